"""What a plan costs: devices by the hour, and bytes over links that are paid for."""

from collections.abc import Iterator
from itertools import pairwise

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, Stage
from arachne_runtime.plan.rows import consecutive, overlaps
from arachne_runtime.plan.segments import segments
from arachne_runtime.units import GB, Seconds

from ..request import Request

HOUR_S = 3600.0


def price_per_hour(plan: Plan, iteration_s: Seconds, request: Request) -> float:
    """Devices in use and traffic of a plan; nodes without a price count nothing."""
    nodes = request.fleet.nodes
    devices = sum(nodes[node_of(device)].price_per_hour or 0.0 for device in plan.devices)
    return devices + traffic_price(plan, request) * HOUR_S / iteration_s


def traffic_price(plan: Plan, request: Request) -> float:
    """Price of the bytes of one iteration: messages between stages, and rings of gradients."""
    if not any(pair.price_per_GB for pair in request.cluster.network.pair):
        return 0.0
    paid = (*_messages(plan, request), *_rings(plan, request))
    return sum(size / GB * _price_per_GB(a, b, request) for a, b, size in paid)


def _price_per_GB(a: str, b: str, request: Request) -> float:  # noqa: N802 - a unit
    return 0.0 if a == b else request.cluster.link(a, b).price_per_GB or 0.0


_Sent = Iterator[tuple[str, str, float]]
"""From a node, to a node, bytes."""


def _messages(plan: Plan, request: Request) -> _Sent:
    """Each receiver's devices get the whole boundary tensor, forward and back."""
    for pipeline in plan.pipelines:
        for before, after in pairwise(pipeline.stages):
            size = request.tables.output_bytes[before.layers[1] - 1] * pipeline.micro_batches
            for overlap in overlaps(consecutive(before.shares), consecutive(after.shares)):
                a, b = before.replicas[overlap.sender], after.replicas[overlap.receiver]
                both = len(a.devices) + len(b.devices)
                yield node_of(a.devices[0]), node_of(b.devices[0]), len(overlap.rows) * size * both


def _rings(plan: Plan, request: Request) -> _Sent:
    """A ring sends all but one share of the gradients twice over each of its edges."""
    gradient = request.model.bytes_per_parameter.gradient
    own = request.tables.own_parameters
    for segment in segments(plan):
        holders = [plan.pipelines[p].stages[s] for p, s in segment.holders]
        members = [node for stage in holders for node in _nodes(stage)]
        if len(members) > 1:
            size = (own[segment.stop] - own[segment.start]) * gradient * 2 * (len(members) - 1) / len(members)
            for a, b in zip(members, (*members[1:], members[0]), strict=True):
                yield a, b, size


def _nodes(stage: Stage) -> Iterator[str]:
    return (node_of(replica.devices[0]) for replica in stage.replicas)
