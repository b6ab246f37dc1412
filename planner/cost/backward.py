"""What the backward of a stage holds at its peak, from what was measured of each of its kinds of blocks.

A backward goes down block by block. When it has come to one, what the blocks behind it kept is free again,
and in a step's first backward their parameters have gradients that were not there before. Blocks of a kind
are alike, so the peak is at the last or at the first of some kind.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from arachne_runtime.plan.profile import WorkingBytes

from .amounts import Amount, Bound, larger

if TYPE_CHECKING:
    from .tables import Tables

_NONE = -1e30
"""Bytes of a peak at a block that the stage does not have."""


class BackwardPeaks:
    """Peaks over what the stage's micro-batch keeps, for one device type, TP degree and share."""

    def __init__(
        self,
        tables: "Tables",
        kept: tuple[float, ...],
        working: Sequence[WorkingBytes],
        device: str,
        tp: int,
        samples: int,
        tile: int = 1,
    ) -> None:
        """``kept``: prefix sums over blocks, as are ``loss_bytes``; ``working``: of each block."""
        self._tables = tables
        self._kept = kept
        self._working = working
        weight = tables.model.bytes_per_parameter.gradient / tp
        beyond = tables.beyond_prefix(device, tp)
        inputs = (0.0, *tables.output_bytes[:-1])
        self._forwards = tables.by_kind(
            [w.forward + samples * i for w, i in zip(working, inputs, strict=True)]
        )
        self._losses = tables.by_kind([float(w.loss + w.recomputed) for w in working])
        self._leaving = (0.0, *(float(samples * out) for out in tables.output_bytes))
        """By end of the stage: the gradient that it is given, which stays until its backward is through."""
        self._weight = weight
        self._gradients = tuple(weight * own for own in tables.own_parameters)
        if beyond is not None:
            pairs = zip(self._gradients, beyond, strict=True)
            self._gradients = tuple(even + weight * tp * more for even, more in pairs)
        if tables.expert_parameters[-1]:
            also = weight * tp * (1 / tile - 1 / tp)
            pairs = zip(self._gradients, tables.expert_parameters, strict=True)
            self._gradients = tuple(of + also * experts for of, experts in pairs)
        self.loss_bytes = tuple(accumulate((float(w.loss) for w in working), initial=0.0))

    @classmethod
    def both(
        cls,
        tables: "Tables",
        kept: tuple[float, ...],
        working: Sequence[WorkingBytes],
        device: str,
        tp: int,
        samples: int,
        tile: int = 1,
    ) -> "tuple[BackwardPeaks, BackwardPeaks]":
        """Without recomputation, and with it."""
        usual = cls(tables, kept, working, device, tp, samples, tile)
        again = tuple(k - loss for k, loss in zip(kept, usual.loss_bytes, strict=True))
        rows = [_behind_loss(row) if row.loss else row for row in working]
        return usual, cls(tables, again, rows, device, tp, samples, tile)

    @classmethod
    def owing(
        cls,
        tables: "Tables",
        kept: tuple[float, ...],
        owed: tuple[float, ...],
        working: Sequence[WorkingBytes],
        device: str,
        tp: int,
        samples: int,
    ) -> "BackwardPeaks":
        """Of backwards that leave out gradients of weights: of each block ``owed`` stays."""
        rows = [replace(row, backward=row.owing_backward or 0) for row in working]
        freed = tuple(k - o for k, o in zip(kept, owed, strict=True))
        return cls(tables, freed, rows, device, tp, samples)

    def forward(self, start: Bound, stop: Bound) -> Amount:
        """Beside what the stage is given, in a forward that keeps nothing."""
        return self._tables.largest(self._forwards, start, stop)

    def at_loss(self, start: Bound, stop: Bound) -> Amount:
        """In the loss and its backward, before anything is computed again; 0 without a loss."""
        return self._tables.largest(self._losses, start, stop)

    def later(self, start: Bound, stop: Bound) -> Amount:
        """Beside all that is kept, in a backward that finds gradients of all parameters."""
        return self._at_its_peak(self._of_later, start, stop) - self._tables.at(self._kept, stop)

    def first(self, start: Bound, stop: Bound) -> Amount:
        """Beside all that is kept, in the first backward of a step; the gradients that it makes count."""
        tables = self._tables
        at_last = self._at_its_peak(self._of_first, start, stop)
        leaving = tables.at(self._leaving, stop)
        at_first = self._at_its_peak(self._from_first, start, stop, by_stop=False, least=2) + leaving
        shared = tables.parameters_of(start, stop) - tables.between(tables.own_parameters, start, stop)
        made = tables.at(self._gradients, stop) - tables.at(self._kept, stop)
        return larger(at_last, at_first) + made + self._weight * shared

    def _at_its_peak(
        self,
        values: Sequence[tuple[float, ...]],
        start: Bound,
        stop: Bound,
        *,
        by_stop: bool = True,
        least: int = 1,
    ) -> Amount:
        """The largest, over kinds of which the stage has ``least`` blocks."""
        found: Amount = _NONE
        for value, count in zip(values, self._tables.of_kind, strict=True):
            there = self._tables.between(count, start, stop) >= least
            at = self._tables.at(value, stop if by_stop else start)
            found = larger(found, at * there + _NONE * (1 - there))
        return found

    @cached_property
    def _of_later(self) -> list[tuple[float, ...]]:
        """By kind and end of the stage: at the last block of the kind, with all that is kept up to it."""
        return [self._by_end(self._last(kind), self._later_at) for kind in self._tables.of_kind]

    @cached_property
    def _of_first(self) -> list[tuple[float, ...]]:
        """The same, without the gradients that are made at it and before it."""
        return [self._by_end(self._last(kind), self._first_at) for kind in self._tables.of_kind]

    @cached_property
    def _from_first(self) -> list[tuple[float, ...]]:
        """By kind and start of the stage: the same at the first block of the kind."""
        return [
            tuple(0.0 if block is None else self._first_at(block) for block in self._next(kind))
            for kind in self._tables.of_kind
        ]

    def _later_at(self, block: int) -> float:
        return self._working[block].backward + self._kept[block + 1]

    def _first_at(self, block: int) -> float:
        return self._working[block].first_backward + self._kept[block + 1] - self._gradients[block + 1]

    def _by_end(self, blocks: Sequence[int | None], value: Callable[[int], float]) -> tuple[float, ...]:
        return tuple(
            0.0 if block is None else value(block) + (self._leaving[stop] if block < stop - 1 else 0.0)
            for stop, block in enumerate(blocks)
        )

    def _last(self, counts: Sequence[int]) -> list[int | None]:
        """By boundary: the last block of a kind before it; ``counts``: how many there are."""
        found: list[int | None] = [None]
        for block, (before, behind) in enumerate(pairwise(counts)):
            found.append(block if behind > before else found[-1])
        return found

    def _next(self, counts: Sequence[int]) -> list[int | None]:
        """By boundary: the first block of a kind behind it."""
        found: list[int | None] = [None]
        for block, (before, behind) in reversed(list(enumerate(pairwise(counts)))):
            found.append(block if behind > before else found[-1])
        return found[::-1]


def _behind_loss(row: WorkingBytes) -> WorkingBytes:
    """Of the last block, computed again: its own backward, with the gradient that its loss's leaves it."""
    if not row.behind_loss:  # of an older profile
        return replace(row, backward=row.loss + row.backward, first_backward=row.loss + row.first_backward)
    return replace(row, backward=row.behind_loss, first_backward=row.first_behind_loss)
