"""What was found best on each problem, for each depth of the first template: the policy imitates itself."""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..policy.roll import Rollouts
from .labels import TemplateSequence
from .sequences import runs_of

Floats = NDArray[np.float64]

WORTH = 0.8
"""Part of the best throughput known of a problem, below which a rollout is not kept, whatever its depth."""

MOST_DEPTHS = 6
"""Sequences kept of a problem, of different depths."""

SHARPNESS = 30.0
"""A sequence that is 3.3 % slower than the best one weighs e times less: about what a plan may err by."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of one problem."""

    problem: int
    throughput: float
    sequence: TemplateSequence


class Buffer:
    """The best sequences by problem and depth."""

    def __init__(self, kept: Iterable[Kept] = ()) -> None:
        self._kept: dict[int, dict[int, Kept]] = {}
        for each in kept:
            self._put(each)

    def __iter__(self) -> Iterator[Kept]:
        return (each for rows in self._kept.values() for each in rows.values())

    def knows(self, problem: int) -> bool:
        """Whether anything of this problem is kept."""
        return problem in self._kept

    def add(self, problem: int, rollouts: Rollouts, throughput: Floats) -> None:
        """Those that are better than what is known of their depth."""
        best = max((k.throughput for k in self._kept.get(problem, {}).values()), default=0.0)
        worth = np.nonzero(throughput > max(0.0, WORTH * best))[0]
        if not len(worth):
            return
        for k in worth[np.argsort(-throughput[worth], kind="stable")][: 2 * MOST_DEPTHS].tolist():
            sequence = sequence_of(rollouts, k)
            self._put(Kept(problem=problem, throughput=float(throughput[k]), sequence=sequence))

    def best(self, problem: int) -> tuple[list[TemplateSequence], list[float]]:
        """Sequences and their weights, which add up to 1."""
        rows = sorted(self._kept.get(problem, {}).values(), key=lambda kept: -kept.throughput)
        sequences = [kept.sequence for kept in rows]
        return sequences, weights_of([rows[0].throughput / kept.throughput for kept in rows])

    def _put(self, kept: Kept) -> None:
        rows = self._kept.setdefault(kept.problem, {})
        depth = sum(run.length for run in kept.sequence[0])
        if depth not in rows or rows[depth].throughput < kept.throughput:
            rows[depth] = kept
        if len(rows) > MOST_DEPTHS:
            del rows[min(rows, key=lambda d: (rows[d].throughput, d))]

    def encoded(self) -> bytes:
        """All of it, for a file."""
        return msgspec.json.encode(list(self))

    @classmethod
    def decoded(cls, data: bytes) -> "Buffer":
        """What ``encoded`` gave."""
        return cls(msgspec.json.decode(data, type=list[Kept]))


def weights_of(relative: Iterable[float]) -> list[float]:
    """Weights that fall with the seconds over those of the best; they add up to 1."""
    raw = np.exp(-SHARPNESS * (np.fromiter(relative, float) - 1))
    return [float(w) for w in raw / raw.sum()] if len(raw) else []


def sequence_of(rollouts: Rollouts, number: int) -> TemplateSequence:
    """The templates of one rollout as runs of alike stages."""
    rows = np.nonzero(rollouts.rollout == number)[0]
    rows = rows[np.argsort(rollouts.position[rows], kind="stable")]
    return tuple(runs_of(rollouts.shapes.stages(k)) for k in rows.tolist())
