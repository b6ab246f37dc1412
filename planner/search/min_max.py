"""Exact cuts of many pipelines at once: the slowest stage as fast as it can be within every stage's memory.

Greedy under a bound on the stage time, and a bisection on that bound for all pipelines together. Exact:
after a failure the bound rises at least to the next value that any stage could have used.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_ROUNDS = 40
"""Rounds of bisection; 12 to 18 are usual."""

ROUNDING = 1e-12
"""Relative slack of sums that were subtracted from each other."""


@dataclass(frozen=True, slots=True)
class Stages:
    """K pipelines of up to S stages; stages that are not there stand behind the others."""

    row: Ints
    """``[K, S]``: index of ``times`` and ``again``; any value where the stage is not there."""
    reach: Ints
    """``[K, S]``: index of ``stops`` and ``stops_again``."""
    depth: Ints
    """``[K]``"""
    times: Floats
    """``[rows, L + 1]``: prefix sums of seconds of a micro-batch."""
    again: Floats
    """The same with recomputation."""
    stops: Ints
    """``[reaches, L + 1]``: last stop that fits, by start."""
    stops_again: Ints
    """The same with recomputation."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The best cut of each pipeline."""

    bounds: Ints
    """``[K, S + 1]``; stages that are not there are empty and end at L."""
    slowest_s: Floats
    """``[K]``; inf where no cut fits."""


def min_max_cuts(stages: Stages) -> Cuts:
    """The cut of every pipeline whose slowest stage is fastest, leaning to the first stages."""
    number, size = stages.row.shape
    length = stages.times.shape[1] - 1
    bounds = np.zeros((number, size + 1), np.int64)
    slowest = np.full(number, np.inf)
    walk = _Walk(stages)
    everyone = np.arange(number)
    most, found, _ = walk.greedy(everyone, np.full(number, np.inf))
    good = np.isfinite(most)
    slowest[good], bounds[good] = most[good], found[good]
    low = np.where(good, walk.least_possible(everyone), np.inf)
    active = everyone[good]
    for _ in range(MOST_ROUNDS):
        active = active[low[active] < slowest[active] * (1 - ROUNDING)]
        if not len(active):
            break
        middle = 0.5 * (low[active] + slowest[active])
        most, found, above = walk.greedy(active, middle)
        good = np.isfinite(most)
        slowest[active[good]], bounds[active[good]] = most[good], found[good]
        low[active[~good]] = np.maximum(middle[~good], above[~good])
    bounds[np.isinf(slowest)] = length
    return Cuts(bounds, slowest)


class _Walk:
    """Greedy cuts under bounds."""

    def __init__(self, stages: Stages) -> None:
        self.of = stages
        self.length = stages.times.shape[1] - 1
        self.plain = _Search(stages.times)
        self.again = _Search(stages.again)
        self.binds = bool((stages.stops < self.length).any())

    def least_possible(self, rows: Ints) -> Floats:
        """No cut has a faster slowest stage: all work spread evenly by speed, blocks as if they were sand."""
        whole = self.of.times[self.of.row[rows], -1]
        there = np.arange(whole.shape[1]) < self.of.depth[rows, None]
        pace: Floats = 1 / np.where(there, 1 / whole, 0).sum(axis=1)
        return pace * (1 - ROUNDING)

    def greedy(self, rows: Ints, bound_s: Floats) -> tuple[Floats, Ints, Floats]:
        """Slowest stage (inf where it fails), bounds, and the least bound under which anything changes."""
        of, length = self.of, self.length
        size = of.row.shape[1]
        depth = of.depth[rows]
        at = np.zeros(len(rows), np.int64)
        bounds = np.zeros((len(rows), size + 1), np.int64)
        slowest, above = np.zeros(len(rows)), np.full(len(rows), np.inf)
        failed = np.zeros(len(rows), bool)
        for s in range(size):
            there = s < depth
            row = of.row[rows, s]
            most = np.minimum(of.stops[of.reach[rows, s], at], length - np.maximum(depth - 1 - s, 0))
            stop, took, next_s = self._step(self.plain, row, at, most, bound_s)
            if self.binds:
                again = self._again(rows, s, row, at, bound_s, depth)
                better = again[0] > stop
                stop, took = np.where(better, again[0], stop), np.where(better, again[1], took)
                next_s = np.minimum(next_s, again[2])
            failed |= there & (stop <= at)
            at = np.where(there, np.maximum(stop, at), at)
            slowest = np.where(there, np.maximum(slowest, took), slowest)
            above = np.where(there, np.minimum(above, next_s), above)
            bounds[:, s + 1] = at
        failed |= at < length
        bounds[:, 1:] = np.where(np.arange(size) >= depth[:, None] - 1, length, bounds[:, 1:])
        return np.where(failed, np.inf, slowest), bounds, above

    def _again(
        self, rows: Ints, s: int, row: Ints, at: Ints, bound_s: Floats, depth: Ints
    ) -> tuple[Ints, Floats, Floats]:
        of = self.of
        most = np.minimum(of.stops_again[of.reach[rows, s], at], self.length - np.maximum(depth - 1 - s, 0))
        return self._step(self.again, row, at, most, bound_s)

    def _step(
        self, search: "_Search", row: Ints, at: Ints, most: Ints, bound_s: Floats
    ) -> tuple[Ints, Floats, Floats]:
        """Furthest stop, its seconds, and the seconds of one block more where memory lets it be owned."""
        prefix = search.prefix
        start = prefix[row, at]
        stop = np.minimum(search.last(row, start + bound_s * (1 + ROUNDING)), most)
        stop = np.maximum(stop, at)
        further = np.minimum(stop + 1, self.length)
        next_s = np.where(stop < most, prefix[row, further] - start, np.inf)
        return stop, prefix[row, stop] - start, next_s


class _Search:
    """The last boundary at or before a time, for many (row, time) at once: one sorted list of all rows."""

    def __init__(self, prefix: Floats) -> None:
        self.prefix = prefix
        self.whole = prefix[:, -1]
        scaled = prefix / self.whole[:, None] + 2.0 * np.arange(len(prefix))[:, None]
        self.flat = scaled.ravel()
        self.width = prefix.shape[1]

    def last(self, row: Ints, until_s: Floats) -> Ints:
        """Index of the last boundary whose prefix is at most ``until_s``."""
        wanted = np.minimum(until_s / self.whole[row], 1.5) + 2.0 * row
        found = np.searchsorted(self.flat, wanted * (1 + 4e-16), side="right") - 1
        return np.asarray(found - row * self.width, np.int64)
