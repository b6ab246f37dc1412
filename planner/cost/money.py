"""What a plan costs: devices by the hour, and bytes over links that are paid for."""

from collections.abc import Iterator
from itertools import pairwise

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, Stage
from arachne_runtime.plan.rows import consecutive, overlaps
from arachne_runtime.plan.segments import segments
from arachne_runtime.units import GB

from .tables import Tables


def devices_per_hour(plan: Plan, tables: Tables) -> float | None:
    """Price of the devices in use for an hour; None where one has no price."""
    total = 0.0
    for device in plan.devices:
        price = tables.fleet.node(node_of(device)).price_per_hour
        if price is None:
            return None
        total += price
    return total


def traffic_price(plan: Plan, tables: Tables) -> float:
    """Price of the bytes of one iteration: messages between stages, and rings of gradients.

    A link without a stated price costs nothing.
    """
    if not any(pair.price_per_GB for pair in tables.fleet.cluster.network.pair):
        return 0.0
    paid = (*_messages(plan, tables), *_rings(plan, tables))
    return sum(size / GB * _per_gigabyte(a, b, tables) for a, b, size in paid)


def _per_gigabyte(a: str, b: str, tables: Tables) -> float:
    return 0.0 if a == b else tables.fleet.cluster.link(a, b).price_per_GB or 0.0


_Sent = Iterator[tuple[str, str, float]]
"""From a node, to a node, bytes."""


def _messages(plan: Plan, tables: Tables) -> _Sent:
    """A boundary tensor crosses once, forward and back: tensor-parallel ranks send a part of it each."""
    for pipeline in plan.pipelines:
        for before, after in pairwise(pipeline.stages):
            size = 2 * tables.output_bytes[before.layers[1] - 1] * pipeline.micro_batches
            for overlap in overlaps(consecutive(before.shares), consecutive(after.shares)):
                a, b = before.replicas[overlap.sender], after.replicas[overlap.receiver]
                yield node_of(a.devices[0]), node_of(b.devices[0]), len(overlap.rows) * size


def _rings(plan: Plan, tables: Tables) -> _Sent:
    """A ring sends all but one share of the gradients twice over each of its edges."""
    gradient = tables.model.bytes_per_parameter.gradient
    own = tables.own_parameters
    for segment in segments(plan):
        holders = [plan.pipelines[p].stages[s] for p, s in segment.holders]
        members = [node for stage in holders for node in _nodes(stage)]
        if len(members) > 1:
            size = (own[segment.stop] - own[segment.start]) * gradient * 2 * (len(members) - 1) / len(members)
            for a, b in zip(members, (*members[1:], members[0]), strict=True):
                yield a, b, size


def _nodes(stage: Stage) -> Iterator[str]:
    return (node_of(replica.devices[0]) for replica in stage.replicas)
