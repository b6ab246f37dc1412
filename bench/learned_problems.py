"""The problems of `bench.learned`: drawn ones that training never saw, and those of the other benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec.structs import replace as with_fields

from bench import planning_time
from bench.grid import full, quick
from bench.learned_records import Sort
from planner.request import Request
from planner.training.draw import held_out, validation
from planner.training.labels import Space

FIRST_SEED = 10_000
"""Of validation problems here: training chooses weights by those with the first few hundred seeds."""


class Problem(Protocol):
    """Something to plan for; goes to another process."""

    @property
    def name(self) -> str:
        """As a file may be called."""
        ...

    def request(self) -> Request:
        """A new one: it remembers nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A random problem of a seed that training does not use."""

    number: int
    unseen: bool = False
    """Whether it has device types and a model family that training never saw."""
    most_devices: int = 1024

    @property
    def name(self) -> str:
        return f"{'unseen' if self.unseen else 'validation'}-{self.number}"

    def request(self) -> Request:
        space = Space(devices=(2, self.most_devices))
        if self.unseen:
            return held_out(self.number, space).request
        return validation(FIRST_SEED + self.number, space).request


def grid(*, whole: bool) -> Iterator[Problem]:
    """The planners' grid and the largest case of the planning time; or two small cells."""
    if whole:
        yield from full()
        yield planning_time.LARGEST
    else:
        yield from [cell for cell in quick() if sum(cell.devices.values()) <= 64][:2]


def sort_of(request: Request) -> Sort:
    """What kind of problem a request is."""
    entries = request.cluster.node
    return Sort(
        num_devices=len(request.cluster.devices),
        num_types=len({entry.device for entry in entries}),
        mixed_nodes=len({entry.gpus for entry in entries}) > 1,
        experts=any(block.experts for block in request.model.blocks),
    )


def one_node_less(request: Request) -> Request | None:
    """The same question without one node of some entry; None where each has too few to keep its names."""
    return _changed(request, -1)


def one_node_more(request: Request) -> Request | None:
    """The same question with another node of that entry: the running plan's devices are all there."""
    return _changed(request, 1)


def _changed(request: Request, nodes: int) -> Request | None:
    entries = list(request.cluster.node)
    at = next((at for at, entry in enumerate(entries) if entry.count > 2), None)
    if at is None:
        return None
    entries[at] = with_fields(entries[at], count=entries[at].count + nodes)
    return replace(request, cluster=with_fields(request.cluster, node=tuple(entries)))
