"""What a change from the running plan to another one costs: bytes that must move, and the standstill."""

from collections.abc import Mapping

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import GB, Seconds

from ..request import Request

Held = Mapping[str, Mapping[int, tuple[int, int]]]
"""By device, the blocks that it holds, each as (shard, of so many shards)."""


def same_layout(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in nothing that a rank sees."""
    return a.pipelines == b.pipelines and a.schedule == b.schedule


def still_there(plan: Plan, request: Request) -> bool:
    """Whether every device of a plan is in the cluster."""
    there = set(request.cluster.devices)
    return all(device in there for device in plan.devices)


def change_factor(plan: Plan, request: Request) -> float:
    """By how much the change makes every iteration until the next one longer; 1 for the running plan.

    A horizon of H seconds of which C are lost: H / (H - C); beyond half of it its tangent, so that plans
    stay ordered when all of them cost more than the horizon has.
    """
    if request.running is None or same_layout(plan, request.running):
        return 1.0
    lost = change_seconds(request.running, plan, request) / request.change_every_s
    return 1 / (1 - lost) if lost < 0.5 else 2 + 4 * (lost - 0.5)


def change_seconds(old: Plan, new: Plan, request: Request) -> Seconds:
    """The fixed pause, and the node that waits longest for its bytes: one NIC for what comes from others."""
    before = _held(old)
    nodes_before: dict[str, set[tuple[int, tuple[int, int]]]] = {}
    for device, blocks in before.items():
        nodes_before.setdefault(node_of(device), set()).update(blocks.items())
    entering: dict[str, float] = {}
    for device, blocks in _held(new).items():
        node = node_of(device)
        for block, shard in blocks.items():
            if before.get(device, {}).get(block) != shard and (block, shard) not in nodes_before.get(
                node, ()
            ):
                entering[node] = entering.get(node, 0.0) + _state_bytes(block, request) / shard[1]
    slowest = max((size / _bandwidth(node, request) for node, size in entering.items()), default=0.0)
    return request.migration_pause_s + slowest


def _held(plan: Plan) -> Held:
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                for shard, device in enumerate(replica.devices):
                    blocks = found.setdefault(device, {})
                    blocks.update(dict.fromkeys(stage.blocks, (shard, len(replica.devices))))
    return found


def _state_bytes(block: int, request: Request) -> float:
    """Weights and optimizer states; gradients are made anew."""
    sizes = request.model.bytes_per_parameter
    return request.model.blocks[block].parameters * (sizes.weight + sizes.optimizer)


def _bandwidth(node: str, request: Request) -> float:
    """Bytes a second into a node: the general network, or its slowest stated link where that is slower."""
    network = request.cluster.network
    places = {node, request.cluster.nodes_by_name[node].entry.name}
    stated = [pair.inter_GBps for pair in network.pair if places & set(pair.between)]
    return min([network.inter_GBps, *stated]) * GB
