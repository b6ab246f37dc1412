"""From templates to devices: which device stands where, so that those that talk most share a node."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .supply import Supply
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


class _Free:
    """Free devices of one pool by node, while a template is placed."""

    def __init__(self, nodes: Sequence[tuple[str, int]]) -> None:
        self._left = [[f"{name}:{i}" for i in range(size)] for name, size in nodes]
        self._near: int | None = None
        """The node that the last group was taken from."""
        self._others: dict[int, list[int]] = {}
        """The other nodes by number of free devices, first ones first (heaps)."""
        for number, (_, size) in enumerate(nodes):
            self._others.setdefault(size, []).append(number)

    def take(self, count: int) -> Seat | None:
        """``count`` devices of one node: of the last one if it can, else of the one that they fill best."""
        if self._near is None or len(self._left[self._near]) < count:
            self._leave()
            sizes = [size for size, nodes in self._others.items() if nodes and size >= count]
            if not sizes:
                return None
            self._near = heappop(self._others[count if count in sizes else max(sizes)])
        free = self._left[self._near]
        taken = tuple(free[:count])
        del free[:count]
        return taken

    def _leave(self) -> None:
        """Put the last node back among the others."""
        if self._near is not None and self._left[self._near]:
            heappush(self._others.setdefault(len(self._left[self._near]), []), self._near)
        self._near = None


@dataclass(slots=True)
class _Seating:
    supply: Supply
    pools: list[_Free] = field(init=False)

    def __post_init__(self) -> None:
        self.pools = [_Free(pool.nodes) for pool in self.supply.pools]

    def seat(self, group: Group) -> list[Seat] | None:
        """All replicas of a group, or None where the nodes cannot hold them."""
        seats = []
        for _ in range(group.width):
            taken = self.pools[group.pool].take(group.tp)
            if taken is None:
                return None
            seats.append(taken)
        return seats


def placements(template: Template, supply: Supply) -> Iterator[Placement]:
    """The template on concrete devices, in two ways: replicas of a stage close, or those of a pipeline.

    Nothing is yielded where the nodes cannot hold it (a tensor-parallel group must fit into a node).
    """
    seen = set()
    for by_stage in (True, False):
        placement = place(template, supply, by_stage=by_stage)
        if placement is not None and placement not in seen:
            seen.add(placement)
            yield placement


def place(template: Template, supply: Supply, *, by_stage: bool) -> Placement | None:
    """Groups in the order of their neighbourhood, or the largest first where that leaves no room for them."""
    places = [(p, s) for p, pipeline in enumerate(template.pipelines) for s in range(pipeline.depth)]
    ordered = sorted(places, key=lambda at: at[::-1]) if by_stage else places
    found = _seated(template, supply, ordered)
    if found is None:
        largest = sorted(ordered, key=lambda at: -max(g.tp for g in _groups(template, at)))
        found = _seated(template, supply, largest)
    return found


def _groups(template: Template, at: tuple[int, int]) -> Sequence[Group]:
    return template.pipelines[at[0]].stages[at[1]].groups


def _seated(template: Template, supply: Supply, places: Sequence[tuple[int, int]]) -> Placement | None:
    seating = _Seating(supply)
    seats: dict[tuple[int, int], list[Seat]] = {}
    for at in places:
        for group in _groups(template, at):
            taken = seating.seat(group)
            if taken is None:
                return None
            seats.setdefault(at, []).extend(taken)
    return Placement(
        tuple(
            tuple(tuple(seats[p, s]) for s in range(pipeline.depth))
            for p, pipeline in enumerate(template.pipelines)
        )
    )
