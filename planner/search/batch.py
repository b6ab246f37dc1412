"""Many templates as arrays: one pipeline each, and how many alike ones stand side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .template import Group, PipelineTemplate, StageTemplate

Ints = NDArray[np.int64]

StagePlan = tuple[int, int, int, int]
"""Pool, TP degree, width of one stage, and devices that together hold its experts once (EP x ETP)."""


@dataclass(frozen=True, slots=True)
class Templates:
    """K templates of up to S stages; stages that are not there have width 0 and stand behind the others."""

    pool: Ints
    """``[K, S]``"""
    tp: Ints
    """``[K, S]``"""
    width: Ints
    """``[K, S]``"""
    tile: Ints
    """``[K, S]``: EP x ETP; 1 for dense models."""
    copies: Ints
    """``[K]``: pipelines side by side."""
    micro_batch: Ints
    """``[K]``"""

    @classmethod
    def of(cls, lines: Sequence[tuple[Sequence[StagePlan], int, int]]) -> "Templates":
        """From (stages, copies, micro-batch) of each."""
        size = max((len(stages) for stages, _, _ in lines), default=1)
        table = np.zeros((len(lines), size, 4), np.int64)
        table[:, :, 1] = table[:, :, 3] = 1
        for k, (stages, _, _) in enumerate(lines):
            table[k, : len(stages)] = np.reshape(stages, (len(stages), 4))
        return cls(
            table[:, :, 0],
            table[:, :, 1],
            table[:, :, 2],
            table[:, :, 3],
            np.array([n for _, n, _ in lines], np.int64),
            np.array([b for _, _, b in lines], np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence["Templates"]) -> "Templates":
        """All of them, one behind the other."""
        size = max(part.pool.shape[1] for part in parts)
        return cls(
            *(
                np.concatenate([_padded(getattr(part, field.name), size, field.name) for part in parts])
                for field in fields(cls)
            )
        )

    def __len__(self) -> int:
        return len(self.copies)

    @property
    def depth(self) -> Ints:
        """``[K]``: stages of each."""
        found: Ints = (self.width > 0).sum(axis=1)
        return found

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> "Templates":
        """Some of them, in that order."""
        return Templates(*(getattr(self, field.name)[index] for field in fields(self)))

    def stages(self, k: int) -> tuple[StagePlan, ...]:
        """The stages of one template as plain numbers."""
        depth = int((self.width[k] > 0).sum())
        rows = (field[k, :depth].tolist() for field in (self.pool, self.tp, self.width, self.tile))
        return tuple(zip(*rows, strict=True))

    def distinct(self) -> "Templates":
        """Each once, the first of equals, order kept."""
        rows = np.concatenate(
            [self.pool, self.tp, self.width, self.tile, self.copies[:, None], self.micro_batch[:, None]],
            axis=1,
        )
        return self.take(firsts(rows))


def firsts(rows: Ints) -> Ints:
    """Indices of ``[K, C]`` rows that no earlier one equals, in order.

    By a hash of their bytes: sorting them, as ``np.unique`` does, takes four to twelve times as long.
    """
    if rows.size == 0:
        return np.arange(min(1, len(rows)))
    whole = np.ascontiguousarray(rows)
    keys = whole.view(np.dtype((np.void, whole.itemsize * whole.shape[1]))).ravel().tolist()
    found = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
    return np.sort(np.fromiter(found.values(), np.int64, len(found)))


def pipeline_of(stages: Sequence[StagePlan]) -> PipelineTemplate:
    """As a template for ``planner.search.place``."""
    return PipelineTemplate(tuple(StageTemplate((Group(p, t, w),)) for p, t, w, _ in stages))


def _padded(array: Ints, size: int, name: str) -> Ints:
    if array.ndim == 1 or array.shape[1] == size:
        return array
    fill = 1 if name in ("tp", "tile") else 0
    return np.pad(array, ((0, 0), (0, size - array.shape[1])), constant_values=fill)
