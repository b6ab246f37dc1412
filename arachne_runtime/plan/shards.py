"""Which part of each parameter a rank holds, and which ranks sum which parts; pure arithmetic, no tensors.

A parameter is known by its whole shape. Ranks that cut it differently share *atoms*: the cells of the common
refinement of all their cuts. Half of a TP-2 shard of a fused q, k, v is not a TP-4 shard of it, so the shards
themselves cannot be summed; atoms can.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import TypeAlias

from ..units import Bytes
from .placement import Place, places
from .plan import Plan, Stage

Intervals: TypeAlias = tuple[range, ...]
"""Some indices of one dim of the whole parameter: ascending runs that do not touch."""
Part: TypeAlias = tuple[Intervals, ...]
"""By dim, what of the whole parameter; the part is their product."""
Cell: TypeAlias = tuple[range, ...]
"""A box of the whole parameter: a run of each dim."""
Box: TypeAlias = tuple[slice, ...]
"""A slice for each dim."""


class Axis(StrEnum):
    """A mesh axis along which parameters are cut."""

    TENSOR = "tensor"
    """The devices of a replica."""
    EXPERT = "expert"
    """The groups of devices of a stage that hold different experts."""
    EXPERT_TENSOR = "expert_tensor"
    """The devices that hold parts of the same experts."""


@dataclass(frozen=True, slots=True)
class Split:
    """One dim of a parameter, cut along one axis.

    The dim is a row of logical sub-tensors (q, k and v; gate and up; most often one), each of which is cut
    alone: a rank holds its part of the first, behind it its part of the second, and so on.
    """

    axis: Axis
    dim: int
    parts: tuple[int, ...]
    """Length of each sub-tensor; together the whole dim."""
    units: tuple[int, ...]
    """Of each: in how many indivisible pieces it is (heads, experts; its length where rows stand alone)."""
    repeats: bool = False
    """Whether units fewer than the degree are held by several ranks, each of which uses them for other heads
    and so has a part of their gradient (the k and v of grouped-query attention)."""

    def refusal(self, degree: int) -> str | None:
        """Why this cannot be cut into ``degree``, with the way out; None where it can."""
        for length, units in zip(self.parts, self.units, strict=True):
            if units % degree == 0 or (self.repeats and degree % units == 0):
                continue
            if units == length >= degree:
                continue
            fitting = [d for d in range(1, degree) if units % d == 0]
            what = f"{units} rows" if units == length else f"{units} units of {length // units} rows"
            return (
                f"dim {self.dim} is {what}, which {degree} ranks cannot share without a cut through one or a "
                f"rank with none; use a degree out of {', '.join(map(str, fitting))}"
            )
        return None


@dataclass(frozen=True, slots=True)
class ParameterForm:
    """What must be known of a parameter to say who holds and sums which part."""

    name: str
    """Global name."""
    shape: tuple[int, ...]
    """Whole."""
    itemsize: Bytes
    requires_grad: bool = True
    tie: str | None = None
    """Name of the tie, where other blocks hold it too."""
    splits: tuple[Split, ...] = ()
    """At most one a dim, each along an axis of its own."""
    partial: bool = False
    """Whether copies within one replica each have a part of the gradient (a norm of q over sharded heads)."""

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_of_experts(self) -> bool:
        """Whether the devices of a stage hold it as tiles of experts, not as replicas."""
        return any(split.axis is not Axis.TENSOR for split in self.splits)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands along the axes that cut parameters: (coordinate, degree) each."""

    tensor: tuple[int, int] = (0, 1)
    expert: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)

    def along(self, axis: Axis) -> tuple[int, int]:
        """Coordinate and degree on one axis."""
        match axis:
            case Axis.TENSOR:
                return self.tensor
            case Axis.EXPERT:
                return self.expert
            case Axis.EXPERT_TENSOR:
                return self.expert_tensor


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that holds a part of a parameter."""

    rank: int
    unit: tuple[int, int, int]
    """(pipeline, stage, replica), or for experts (pipeline, stage, tile): the holders of one unit hold the
    whole parameter between them, and their unit's part of the sum is added once."""
    position: Position


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of a parameter that each rank holds all of, or nothing: it is summed in one piece."""

    intervals: Part
    """By dim; the part is their product."""
    members: tuple[int, ...]
    """Ranks that hold it, ascending; the first counts it in the norm."""
    contributors: tuple[int, ...]
    """Those whose gradients add up to the whole; the others have copies of what one of these has."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the dense tensor that the part is, its intervals pushed together."""
        return tuple(sum(map(len, runs)) for runs in self.intervals)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def position_of(plan: Plan, place: Place) -> Position:
    """The coordinates of a rank at one of its places."""
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    tp, ep, etp = len(stage.replicas[place.replica].devices), stage.expert_parallel, stage.expert_tensor
    index = stage.devices.index(place.device)
    return Position((place.tp_rank, tp), (index // etp % ep, ep), (index % etp, etp))


def held(form: ParameterForm, position: Position) -> Part:
    """By dim, what a rank holds; its local tensor is these rows one behind the other."""
    by_dim = {split.dim: split for split in form.splits}
    return tuple(
        held_runs(by_dim[dim], position) if dim in by_dim else (range(length),)
        for dim, length in enumerate(form.shape)
    )


def held_runs(split: Split, position: Position) -> Intervals:
    """What a rank holds of the dim that is split."""
    index, degree = position.along(split.axis)
    assert split.refusal(degree) is None, split.refusal(degree)
    runs = []
    for start, length, units in zip(
        accumulate(split.parts, initial=0), split.parts, split.units, strict=False
    ):
        mine = even_part(units, index, degree)
        if units < degree:
            first = index // (degree // units)
            mine = range(first, first + 1)
        rows = length // units
        runs.append(range(start + mine.start * rows, start + mine.stop * rows))
    return _joined(runs)


def local_shape(form: ParameterForm, position: Position) -> tuple[int, ...]:
    """Of the tensor that a rank holds."""
    return tuple(sum(map(len, runs)) for runs in held(form, position))


def boxes(part: Part, whole: Part) -> Iterator[tuple[Box, Box]]:
    """For each run of ``part``, which lies in ``whole``: where it is in each as a dense tensor."""
    by_dim = [list(_runs(a, b)) for a, b in zip(part, whole, strict=True)]
    for runs in product(*by_dim):
        yield tuple(inner for inner, _ in runs), tuple(outer for _, outer in runs)


def holders(plan: Plan, form: ParameterForm, blocks: Iterable[int]) -> tuple[Holder, ...]:
    """All ranks that hold a parameter of some ``blocks`` (several where they share it), by place."""
    wanted = set(blocks)
    return tuple(
        Holder(place.rank, (place.pipeline, place.stage, _unit(stage, place, form)), position_of(plan, place))
        for place in places(plan)
        if wanted.intersection((stage := plan.pipelines[place.pipeline].stages[place.stage]).blocks)
    )


def atoms(form: ParameterForm, held_by: Sequence[Holder]) -> tuple[Atom, ...]:
    """The parts of a parameter, by where they begin: cells that the same ranks hold and add up are one."""
    parts = form.partial or any(split.repeats for split in form.splits)
    return _atoms(form.shape, form.splits, parts, tuple(held_by))


def cells(parts: Iterable[Part], num_dims: int) -> Iterator[Cell]:
    """The boxes of a tensor that none of ``parts`` cuts, ascending; also some that none of them holds."""
    by_dim: list[set[int]] = [set() for _ in range(num_dims)]
    for part in parts:
        for edges, runs in zip(by_dim, part, strict=True):
            edges.update(edge for run in runs for edge in (run.start, run.stop))
    return product(*([range(a, b) for a, b in pairwise(sorted(edges))] for edges in by_dim))


def lies_in(cell: Cell, part: Part) -> bool:
    """Whether a part, which does not cut the cell, holds it."""
    return all(any(r.start <= c.start < r.stop for r in runs) for runs, c in zip(part, cell, strict=True))


def grids(alike: Sequence[Cell], num_dims: int) -> Iterator[Part]:
    """Cells as one product of intervals where they are one, else each alone."""
    by_dim = [sorted({cell[dim] for cell in alike}, key=lambda run: run.start) for dim in range(num_dims)]
    if math.prod(map(len, by_dim)) == len(alike):
        yield tuple(_joined(runs) for runs in by_dim)
    else:
        yield from (tuple((run,) for run in cell) for cell in alike)


def even_part(count: int, index: int, degree: int) -> range:
    """Run ``index`` of ``count`` things cut into ``degree`` runs as equal as can be, longer ones first."""
    size, longer = divmod(count, degree)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def _joined(runs: Iterable[range]) -> Intervals:
    """Runs in order, those that touch made one."""
    found: list[range] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        elif run:
            found.append(run)
    return tuple(found)


def _runs(part: Intervals, whole: Intervals) -> Iterator[tuple[slice, slice]]:
    """Where each piece of ``part`` that lies in one run of ``whole`` is in both, pushed together."""
    inner = 0
    for run in part:
        outer = 0
        for around in whole:
            low, high = max(run.start, around.start), min(run.stop, around.stop)
            if low < high:
                a, b = inner + low - run.start, outer + low - around.start
                yield slice(a, a + high - low), slice(b, b + high - low)
            outer += len(around)
        inner += len(run)


def _unit(stage: Stage, place: Place, form: ParameterForm) -> int:
    if not form.is_of_experts:
        return place.replica
    return stage.devices.index(place.device) // (stage.expert_parallel * stage.expert_tensor)


@lru_cache(maxsize=4096)
def _atoms(
    shape: tuple[int, ...], splits: tuple[Split, ...], parts: bool, held_by: tuple[Holder, ...]
) -> tuple[Atom, ...]:
    form = ParameterForm("", shape, 0, splits=splits)
    parts_of = [held(form, holder.position) for holder in held_by]
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Cell]] = {}
    for cell in cells(parts_of, len(shape)):
        inside = [h for h, part in zip(held_by, parts_of, strict=True) if lies_in(cell, part)]
        members = tuple(sorted({holder.rank for holder in inside}))
        found.setdefault((members, _contributors(inside, parts)), []).append(cell)
    made = [Atom(grid, *key) for key, alike in found.items() for grid in grids(alike, len(shape))]
    return tuple(sorted(made, key=lambda atom: [(r.start, r.stop) for runs in atom.intervals for r in runs]))


def _contributors(inside: Sequence[Holder], parts: bool) -> tuple[int, ...]:
    """Of each unit the only holder; of several all where each has a part, else the first."""
    by_unit: dict[tuple[int, int, int], list[int]] = {}
    for holder in inside:
        by_unit.setdefault(holder.unit, []).append(holder.rank)
    return tuple(sorted({rank for ranks in by_unit.values() for rank in (ranks if parts else ranks[:1])}))
