"""Finds a loss that is not the mean (or sum) over its rows, by a look at parts and at neighbours of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.batch import join_rows, num_rows_of, slice_rows, take_rows
from ..errors import ModelError, UsageError
from ..units import Bytes
from .tolerance import tolerance_of

MOST_KEPT_BYTES: Bytes = 256 * 2**20
"""Of the outputs for one row (2,048 tokens of 32,768 words in float32) that are kept for the next look."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of what a loss takes."""

    count: int
    outputs: tuple[Tensor, ...]
    samples: Any

    def part(self, rows: range) -> "_Rows":
        outputs = tuple(tensor[rows.start : rows.stop] for tensor in self.outputs)
        return _Rows(len(rows), outputs, slice_rows(self.samples, rows, self.count))

    def first(self) -> "_Rows":
        """A copy of the first row: a view would keep all of them."""
        outputs = tuple(tensor[:1].clone() for tensor in self.outputs)
        return _Rows(1, outputs, take_rows(self.samples, (0,), self.count))

    def joined(self, other: "_Rows") -> "_Rows":
        """One row, and another behind it."""
        return _Rows(2, join_rows(self.outputs, other.outputs), join_rows(self.samples, other.samples))


@dataclass(slots=True)
class LossRule:
    """What a loss must be, so that its parts add up under every plan."""

    loss: Callable[[Any, Any], Tensor]
    is_sum: bool
    """Over items, which ``num_items`` counts; else a mean over rows."""
    kept: _Rows | None = None
    """A row that waits for a neighbour: of another micro-batch or, where a step has one, of another step."""

    def refuse(self, outputs: tuple[Tensor, ...], samples: Any, of_all: Tensor) -> None:
        """Refuse a loss, ``of_all`` rows, that is not made up of those of its parts; ModelError.

        A batch or output that cannot be cut by rows, a loss that fails on other numbers of rows, or one that
        is not finite tells nothing.
        """
        rows = _rows_of(outputs, samples)
        if rows is None:
            return
        first = rows.first()
        if rows.count > 1:
            self._compare(of_all, (first, rows.part(range(1, rows.count))))
        if sum(tensor.nbytes for tensor in first.outputs) > MOST_KEPT_BYTES:
            return
        waiting, self.kept = self.kept, first if self.kept is None else None
        if waiting is not None:
            self._compare(self._of_both(waiting, first), (waiting, first))

    def _compare(self, of_all: Tensor | None, parts: tuple[_Rows, _Rows]) -> None:
        values = [self._of(part) for part in parts]
        if of_all is None or None in values or not of_all.isfinite():
            return
        num_rows = sum(part.count for part in parts)
        of_a, of_b = (float(value) for value in values if value is not None)
        weights = [1.0 if self.is_sum else part.count / num_rows for part in parts]
        expected = weights[0] * of_a + weights[1] * of_b
        found, size = float(of_all), max(abs(of_a), abs(of_b))
        if abs(found - expected) <= tolerance_of(of_all.dtype) * size:
            return
        kind, way = ("sum", "without num_items it would be a mean") if self.is_sum else (
            "mean", "for a mean over tokens return their sum and count them with num_items=")  # fmt: skip
        raise ModelError(
            f"loss(output, batch) is not the {kind} over its rows: {of_a:g} for the first of {num_rows} and "
            f"{of_b:g} for the others, but {found:g} for all ({expected:g} expected), so training would "
            f"depend on the plan; {way}, or waive this with stochastic=True"
        )

    def _of_both(self, one: _Rows, other: _Rows) -> Tensor | None:
        try:
            return self._of(one.joined(other))
        except Exception:  # samples of two shapes
            return None

    def _of(self, rows: _Rows) -> Tensor | None:
        outputs = rows.outputs[0] if len(rows.outputs) == 1 else rows.outputs
        try:
            with torch.no_grad():
                return self.loss(outputs, rows.samples)
        except Exception:  # whatever the user's code raises for a batch that it was not made for
            return None


def _rows_of(outputs: tuple[Tensor, ...], samples: Any) -> _Rows | None:
    try:
        count = num_rows_of(samples)
    except UsageError:
        return None
    if count < 1 or any(tensor.shape[:1] != (count,) for tensor in outputs):
        return None
    return _Rows(count, tuple(tensor.detach() for tensor in outputs), samples)
