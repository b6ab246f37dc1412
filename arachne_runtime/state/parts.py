"""Parts of a whole tensor, as runs of indices by dim: cut, crossed and copied; knows no plan and no file."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from ..plan.shards import Intervals, boxes, cells, lies_in

Part: TypeAlias = tuple[Intervals, ...]
"""By dim, which indices of the whole tensor; the part is their product."""


def whole(shape: Sequence[int]) -> Part:
    """All of a tensor."""
    return tuple((range(length),) for length in shape)


def shape_of(part: Part) -> tuple[int, ...]:
    """Of the dense tensor that a part is, its runs pushed together."""
    return tuple(sum(map(len, runs)) for runs in part)


def numel_of(part: Part) -> int:
    """Number of elements."""
    return math.prod(shape_of(part))


def crossing(a: Part, b: Part) -> Part | None:
    """What lies in both, or None."""
    found = tuple(_common(x, y) for x, y in zip(a, b, strict=True))
    return found if all(found) else None


def covers(parts: Sequence[Part], part: Part) -> bool:
    """Whether some parts, which may overlap, hold all of another."""
    met = [common for other in parts if (common := crossing(other, part)) is not None]
    return part in met or all(
        any(lies_in(cell, each) for each in met)
        for cell in cells((*met, part), len(part))
        if lies_in(cell, part)
    )


def copy_part(part: Part, source: Tensor, source_part: Part, target: Tensor, target_part: Part) -> None:
    """Copy ``part``, which lies in both, from one dense tensor to the other."""
    places = zip(boxes(part, source_part), boxes(part, target_part), strict=True)
    for (_, there), (_, here) in places:
        target[here].copy_(source[there])


def cut_out(part: Part, source: Tensor, source_part: Part) -> Tensor:
    """``part`` as a dense tensor, a view where it is all of the source."""
    if part == source_part:
        return source
    found = source.new_empty(shape_of(part))
    copy_part(part, source, source_part, found, part)
    return found


def run_of_elements(elements: range, part: Part) -> Iterator[tuple[range, Part]]:
    """A run of a dense part's elements, counted row by row, as parts: of each, which elements it is.

    A run of a matrix is the end of a row, some whole rows, and the beginning of a row.
    """
    start = elements.start
    for box in _boxes_of_run(shape_of(part), elements.start, elements.stop):
        length = math.prod(map(len, box))
        yield (
            range(start, start + length),
            tuple(_within(runs, inner) for runs, inner in zip(part, box, strict=True)),
        )
        start += length


def _common(a: Intervals, b: Intervals) -> Intervals:
    met = (range(max(x.start, y.start), min(x.stop, y.stop)) for x in a for y in b)
    return tuple(run for run in met if run)


def _within(runs: Intervals, inner: range) -> Intervals:
    """Places ``inner`` of the runs pushed together, as indices of the whole."""
    found, at = [], 0
    for run in runs:
        low, high = max(inner.start, at), min(inner.stop, at + len(run))
        if low < high:
            found.append(range(run.start + low - at, run.start + high - at))
        at += len(run)
    return tuple(found)


def _boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """The fewest boxes, in order, that make up elements ``start:stop`` of a dense tensor."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, stop // inner
    if first == last:
        for box in _boxes_of_run(shape[1:], start - first * inner, stop - first * inner):
            yield (range(first, first + 1), *box)
        return
    if start % inner:
        for box in _boxes_of_run(shape[1:], start % inner, inner):
            yield (range(first, first + 1), *box)
        first += 1
    if first < last:
        yield (range(first, last), *(range(length) for length in shape[1:]))
    for box in _boxes_of_run(shape[1:], 0, stop % inner):
        yield (range(last, last + 1), *box)
