"""From templates to devices: which device stands where, so that those that talk most share a node."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from arachne_runtime.plan.cluster import Cluster

from .template import Group, Template

Seat = tuple[str, ...]
"""The devices of one replica: its tensor-parallel group."""
StageSeats = tuple[Seat, ...]
PipelineSeats = tuple[StageSeats, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of every replica of every stage of every pipeline; no blocks, no samples."""

    pipelines: tuple[PipelineSeats, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices used."""
        return tuple(d for p in self.pipelines for s in p for seat in s for d in seat)


@dataclass(slots=True)
class _Pool:
    """Free devices by node, while a template is placed."""

    cluster: Cluster
    free: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = {node.name: list(node.devices) for node in self.cluster.nodes}

    def take(self, device: str, count: int, near: str | None) -> Seat | None:
        """``count`` devices of one node: of node ``near`` if it can, else of the node that they fill best."""
        nodes = [
            name
            for name, left in self.free.items()
            if len(left) >= count and self.cluster.nodes_by_name[name].entry.device == device
        ]
        if not nodes:
            return None
        name = (
            near
            if near in nodes
            else min(nodes, key=lambda n: (len(self.free[n]) != count, -len(self.free[n])))
        )
        taken, self.free[name] = self.free[name][:count], self.free[name][count:]
        return tuple(taken)


def placements(template: Template, cluster: Cluster) -> Iterator[Placement]:
    """The template on concrete devices, in two ways: replicas of a stage close, or those of a pipeline.

    Nothing is yielded where the nodes cannot hold it (a tensor-parallel group must fit into a node).
    """
    seen = set()
    for by_stage in (True, False):
        placement = _place(template, cluster, by_stage)
        if placement is not None and placement not in seen:
            seen.add(placement)
            yield placement


def _place(template: Template, cluster: Cluster, by_stage: bool) -> Placement | None:
    pool = _Pool(cluster)
    near: dict[str, str] = {}
    seats: dict[tuple[int, int], list[Seat]] = {}
    places = [(p, s) for p, pipeline in enumerate(template.pipelines) for s in range(pipeline.depth)]
    for p, s in sorted(places, key=lambda place: place[::-1] if by_stage else place):
        for group in template.pipelines[p].stages[s].groups:
            taken = _take_group(pool, group, near)
            if taken is None:
                return None
            seats.setdefault((p, s), []).extend(taken)
    return Placement(
        tuple(
            tuple(tuple(seats[p, s]) for s in range(pipeline.depth))
            for p, pipeline in enumerate(template.pipelines)
        )
    )


def _take_group(pool: _Pool, group: Group, near: dict[str, str]) -> list[Seat] | None:
    taken = []
    for _ in range(group.width):
        seat = pool.take(group.device, group.tp, near.get(group.device))
        if seat is None:
            return None
        near[group.device] = seat[0].rpartition(":")[0]
        taken.append(seat)
    return taken
