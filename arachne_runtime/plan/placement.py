"""From a plan to ranks: which device each rank is, and what that device holds. Equal on every rank."""

from dataclasses import dataclass

from .cluster import index_of, node_of
from .plan import Pipeline, Plan, Replica, Stage


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device stands in a plan; interleaved, one of the several stages that it holds."""

    rank: int
    device: str
    pipeline: int
    stage: int
    replica: int
    tp_rank: int


def rank_order(plan: Plan) -> tuple[str, ...]:
    """Devices by rank: sorted by (node, in order of first appearance in the plan; index in the node)."""
    devices = plan.devices
    nodes = dict.fromkeys(map(node_of, devices))
    first = {node: i for i, node in enumerate(nodes)}
    return tuple(sorted(devices, key=lambda d: (first[node_of(d)], index_of(d))))


def places(plan: Plan) -> tuple[Place, ...]:
    """The place of every rank, by rank; of an interleaved plan all places of each, by stage."""
    rank_of = {device: rank for rank, device in enumerate(rank_order(plan))}
    found = [
        Place(rank_of[device], device, p, s, r, t)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for r, replica in enumerate(stage.replicas)
        for t, device in enumerate(replica.devices)
    ]
    return tuple(sorted(found, key=lambda place: (place.rank, place.stage)))


def places_of(plan: Plan, rank: int) -> tuple[Place, ...]:
    """The places of one rank by stage, ascending: one, or several where the plan is interleaved."""
    return tuple(place for place in places(plan) if place.rank == rank)


def holding(plan: Plan, place: Place) -> tuple[Pipeline, Stage, Replica]:
    """The pipeline, stage and replica at ``place``."""
    pipeline = plan.pipelines[place.pipeline]
    stage = pipeline.stages[place.stage]
    return pipeline, stage, stage.replicas[place.replica]
