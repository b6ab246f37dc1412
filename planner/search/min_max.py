"""Exact cuts of many pipelines at once: the slowest stage as fast as it can be within every stage's memory.

Greedy under a bound on the stage time, and a bisection on that bound for all pipelines together. Exact:
after a failure the bound rises at least to the next value that any stage could have used. Where the greedy
walk leaves a stage a first block that it cannot own, and there is an earlier one that it could, the stages
before may have to own less: every start of every stage is looked at instead.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

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
    order = np.argsort(-stages.depth, kind="stable")
    found = _deepest_first(
        replace(stages, row=stages.row[order], reach=stages.reach[order], depth=stages.depth[order])
    )
    bounds, slowest = np.empty_like(found.bounds), np.empty_like(found.slowest_s)
    bounds[order], slowest[order] = found.bounds, found.slowest_s
    return Cuts(bounds, slowest)


def _deepest_first(stages: Stages) -> Cuts:
    """As ``min_max_cuts``, of pipelines in order of their depths."""
    number, size = stages.row.shape
    length = stages.times.shape[1] - 1
    bounds = np.full((number, size + 1), length)
    slowest = np.full(number, np.inf)
    walk = _Walk(stages)
    everyone = np.arange(number)
    most, found, _ = walk.cut(everyone, np.full(number, np.inf))
    active = everyone[np.isfinite(most)]
    slowest[active], bounds[active] = most[active], found[active]
    low = np.full(number, np.inf)
    low[active] = walk.least_possible(active)
    for _ in range(MOST_ROUNDS):
        active = active[low[active] < slowest[active] * (1 - ROUNDING)]
        if not len(active):
            break
        middle = np.sqrt(low[active] * slowest[active])
        most, found, above = walk.cut(active, middle)
        good = np.isfinite(most)
        slowest[active[good]], bounds[active[good]] = most[good], found[good]
        low[active[~good]] = np.maximum(middle[~good], above[~good])
    return Cuts(bounds, slowest)


class _Walk:
    """Greedy cuts under bounds; ``rows`` are pipelines, the deepest first."""

    def __init__(self, stages: Stages) -> None:
        self.of = stages
        self.length = stages.times.shape[1] - 1
        self.plain = _Search(stages.times)
        self.again = _Search(stages.again)
        self.one_s = _one_block_s(stages)
        """``[reaches, L]``: seconds of each block alone; ``inf`` where it does not fit."""
        inner = np.pad(self.one_s[:, 1:], ((0, 0), (2, 0)), constant_values=np.inf)
        self.least_s = np.minimum.accumulate(inner, axis=1)
        """``[reaches, L + 1]``: seconds of the fastest block before each, the first one left out."""

    def least_possible(self, rows: Ints) -> Floats:
        """No cut has a faster slowest stage.

        With any weights w, sum of w_s t_s <= T sum of w_s, and each block takes at least its least weighted
        seconds; w_s = 1 / seconds of the whole model there is tight where the blocks keep their proportions.
        """
        depth, row = self.of.depth[rows], self.of.row[rows]
        whole = self.of.times[:, -1]
        part = np.diff(self.of.times, axis=1) / whole[:, None]
        least = part[row[:, 0]]
        pace = 1 / whole[row[:, 0]]
        for s in range(1, int(depth.max(initial=0))):
            n = int((depth > s).sum())
            pace[:n] += 1 / whole[row[:n, s]]
            other = np.nonzero(row[:n, s] != row[:n, s - 1])[0]
            least[other] = np.minimum(least[other], part[row[other, s]])
        possible = np.maximum(least.sum(axis=1) / pace, self._least_of_ends(rows))
        return np.asarray(possible * (1 - ROUNDING), float)

    def _least_of_ends(self, rows: Ints) -> Floats:
        """Seconds of the first block on the first stage, or of the last on the last."""
        each, last = self.of.reach[rows, 0], self.of.reach[rows, self.of.depth[rows] - 1]
        found: Floats = np.maximum(self.one_s[each, 0], self.one_s[last, self.length - 1])
        return found

    def cut(self, rows: Ints, bound_s: Floats) -> tuple[Floats, Ints, Floats]:
        """Slowest stage (inf where no cut has a faster one), bounds, and the next bound that could do."""
        slowest, bounds, above, stuck = self._greedy(rows, bound_s)
        if stuck.any():
            slowest[stuck], bounds[stuck], above[stuck] = self._all_starts(rows[stuck], bound_s[stuck])
        return slowest, bounds, above

    def _greedy(self, rows: Ints, bound_s: Floats) -> tuple[Floats, Ints, Floats, Bools]:
        """As ``cut``, each stage as far as it can; and where another walk could do what this cannot."""
        size, depth = self.of.row.shape[1], self.of.depth[rows]
        at = np.zeros(len(rows), np.int64)
        bounds = np.zeros((len(rows), size + 1), np.int64)
        slowest, above = np.zeros(len(rows)), np.full(len(rows), np.inf)
        lost, stuck = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        for s in range(int(depth.max(initial=0))):
            n = int((depth > s).sum())
            stop, took, next_s = self._furthest(rows[:n], s, at[:n], bound_s[:n])
            empty = np.nonzero(stop <= at[:n])[0]
            if len(empty):
                earlier_s = self.least_s[self.of.reach[rows[empty], s], at[empty]] if s else np.inf
                stuck[empty] |= ~lost[empty] & (earlier_s <= bound_s[empty] * (1 + ROUNDING))
                above[empty] = np.minimum(above[empty], earlier_s)
                lost[empty] = True
            at[:n] = np.maximum(stop, at[:n])
            slowest[:n] = np.maximum(slowest[:n], took)
            above[:n] = np.minimum(above[:n], next_s)
            bounds[:, s + 1] = at
        failed = lost | (at < self.length)
        bounds[:, 1:] = np.where(np.arange(size) >= depth[:, None] - 1, self.length, bounds[:, 1:])
        return np.where(failed, np.inf, slowest), bounds, above, stuck

    def _all_starts(self, rows: Ints, bound_s: Floats) -> tuple[Floats, Ints, Floats]:
        """As ``cut``, by which starts of each stage let the rest be owned, from the last stage backwards.

        Every stage owns a block: stage s starts at block s, or up to ``length - depth`` blocks later.
        """
        number, depth = len(rows), self.of.depth[rows]
        spare = self.length - depth
        late = np.arange(int(spare.max()) + 1)
        far = np.zeros((self.of.row.shape[1], number, len(late)), np.int64)
        good = np.zeros((len(far) + 1, number, len(late)), bool)
        good[depth, np.arange(number), spare] = True
        above = np.full(number, np.inf)
        for s in reversed(range(int(depth.max()))):
            n = int((depth > s).sum())
            size = int(spare[n - 1]) + 1
            starts = np.tile(s + late[:size], n)
            stop, _, next_s = self._furthest(
                np.repeat(rows[:n], size), s, starts, np.repeat(bound_s[:n], size)
            )
            far[s, :n, :size] = stop = stop.reshape(n, size)
            above[:n] = np.minimum(above[:n], next_s.reshape(n, size).min(axis=1))
            before = np.pad(np.cumsum(good[s + 1, :n, :size], axis=1), ((0, 0), (1, 0)))
            good[s, :n, :size] |= np.take_along_axis(before, stop - s, axis=1) > before[:, :-1]
        return *self._bounds_of(rows, far, good), above

    def _bounds_of(self, rows: Ints, far: Ints, good: Bools) -> tuple[Floats, Ints]:
        """The cut that leans to the first stages among those that ``good`` starts allow, and its slowest.

        Both arrays by stage, pipeline, and how many blocks behind its number the stage starts.
        """
        size, depth, each = len(far), self.of.depth[rows], np.arange(len(rows))
        late = np.arange(far.shape[2])
        bounds = np.full((len(rows), size + 1), self.length)
        slowest = np.zeros(len(rows))
        at = np.zeros(len(rows), np.int64)
        bounds[:, 0] = at
        for s in range(size):
            there = s < depth
            stops = far[s, each, np.minimum(np.maximum(at - s, 0), late[-1])]
            allowed = good[s + 1] & (s + 1 + late <= stops[:, None])
            last = np.minimum(s + len(late) - np.argmax(allowed[:, ::-1], axis=1), self.length)
            stop = np.where(there, last, self.length)
            took = self._took(rows, s, at, stop)
            slowest = np.where(there, np.maximum(slowest, took), slowest)
            at = bounds[:, s + 1] = stop
        return np.where(good[0, each, 0], slowest, np.inf), bounds

    def _took(self, rows: Ints, s: int, at: Ints, stop: Ints) -> Floats:
        """Seconds of stage ``s`` from ``at`` to ``stop``, with recomputation where memory asks for it."""
        of, row = self.of, self.of.row[rows, s]
        plain = of.stops[of.reach[rows, s], at] >= stop
        prefix = np.where(plain[:, None], of.times[row], of.again[row])
        each = np.arange(len(rows))
        took: Floats = prefix[each, stop] - prefix[each, at]
        return took

    def _furthest(self, rows: Ints, s: int, at: Ints, bound_s: Floats) -> tuple[Ints, Floats, Floats]:
        """Of stage ``s``: furthest stop that leaves a block to every later stage, its seconds, the next's.

        Recomputation is looked at where memory ends the stage before its time does.
        """
        of, row, reach = self.of, self.of.row[rows, s], self.of.reach[rows, s]
        last = self.length - np.maximum(of.depth[rows] - 1 - s, 0)
        most = of.stops[reach, at]
        stop, took, next_s = self._step(self.plain, row, at, np.minimum(most, last), bound_s)
        tight = np.nonzero((stop >= most) & (most < last))[0]
        if len(tight):
            start = at[tight]
            most = np.minimum(of.stops_again[reach[tight], start], last[tight])
            further, again_s, after_s = self._step(self.again, row[tight], start, most, bound_s[tight])
            better = further > stop[tight]
            stop[tight] = np.where(better, further, stop[tight])
            took[tight] = np.where(better, again_s, took[tight])
            next_s[tight] = np.minimum(next_s[tight], after_s)
        return stop, took, next_s

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


def _one_block_s(stages: Stages) -> Floats:
    """``[reaches, L]``: seconds of each block alone, with recomputation where memory asks, or ``inf``."""
    row = np.zeros(len(stages.stops), np.int64)
    row[stages.reach.ravel()] = stages.row.ravel()
    start = np.arange(stages.times.shape[1] - 1)
    plain, again = np.diff(stages.times, axis=1)[row], np.diff(stages.again, axis=1)[row]
    again = np.where(stages.stops_again[:, :-1] > start, again, np.inf)
    return np.asarray(np.where(stages.stops[:, :-1] > start, plain, again), float)


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
