"""Integer shares: largest remainder, and water-filling (equal finishing times)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeAlias

from ..errors import NoFeasiblePlanError, UsageError
from ..units import Seconds

_ROUNDING = 1e-12
"""Relative error of the water level, with room to spare: sums of some thousand terms in float64."""

TimeOf: TypeAlias = Callable[[int, int], Seconds]
"""(replica, samples) → seconds; never less for more samples."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a replica's time: ``intercept + slope * samples`` seconds. Its time is its highest line."""

    intercept: Seconds
    slope: Seconds
    """Seconds a sample, ≥ 0."""

    def at(self, samples: float) -> Seconds:
        """Its value."""
        return self.intercept + self.slope * samples


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``weights`` (positive): floors, then one each by largest remainder.

    Ties go to the lower index. Exact integer arithmetic; ``sum(result) == total``.
    """
    whole = sum(weights)
    floors = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(floors)]:
        floors[i] += 1
    return tuple(floors)


def water_fill(
    total: int, lines: Sequence[Sequence[Line]], minima: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...]:
    """Shares that minimise the slowest replica's time, ``max_i t_i(b_i)`` with ``sum(b) == total``.

    ``t_i`` is the highest of ``lines[i]`` (convex), ``minima[i] <= b_i <= caps[i]``; no samples take no time.
    Exact for integers; ties go to the lower index. O(n log n) for n replicas of a few lines
    (Cannikin, arXiv 2402.05302, finds the real-valued optimum for two lines by a linear system).

    Raises NoFeasiblePlanError unless ``sum(minima) <= total <= sum(caps)``, UsageError for a falling line.
    """
    _refuse_falling(lines)
    _refuse_impossible(total, minima, caps, len(lines))
    level = _water_level(total, lines, minima, caps)
    error = _ROUNDING * max(abs(level), *(abs(line.intercept) for mine in lines for line in mine), 0.0)
    shares, time_of = list(minima), partial(_highest, lines)
    for near in (math.nextafter(level - error, -math.inf), level + error):
        _fill(shares, total, [samples_below(near, *one) for one in zip(lines, minima, caps, strict=True)])
    _give(shares, total, time_of, caps)
    _exchange(shares, time_of, minima, caps)
    return tuple(shares)


def water_fill_table(
    total: int, time_of: TimeOf, minima: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...]:
    """Like ``water_fill``, for measured times that follow no line: any that never fall with more samples.

    Exact: samples go one by one where they finish first. O(total log n), one look-up a sample.
    """
    _refuse_impossible(total, minima, caps, len(minima))
    shares = list(minima)
    _give(shares, total, time_of, caps)
    return tuple(shares)


def _give(shares: list[int], total: int, time_of: TimeOf, caps: Sequence[int]) -> None:
    """One sample at a time to the replica whose time with it is smallest, until all are given."""
    heap = [(time_of(i, b + 1), i) for i, b in enumerate(shares) if b < caps[i]]
    heapify(heap)
    for _ in range(total - sum(shares)):
        _, i = heappop(heap)
        shares[i] += 1
        if shares[i] < caps[i]:
            heappush(heap, (time_of(i, shares[i] + 1), i))


def _fill(shares: list[int], total: int, most: Sequence[int]) -> None:
    """Raise shares to ``most``, in order, while samples are left."""
    rest = total - sum(shares)
    for i, high in enumerate(most):
        step = max(min(high - shares[i], rest), 0)
        shares[i] += step
        rest -= step


def _exchange(shares: list[int], time_of: TimeOf, minima: Sequence[int], caps: Sequence[int]) -> None:
    """Move samples while one replica's last costs more than another's next.

    Where no such pair is left the maximum is least, as a lower one would need such a pair. A rounded
    water level costs a few moves, never exactness.
    """
    gains: list[tuple[Seconds, int, int]] = []
    losses: list[tuple[Seconds, int, int]] = []

    def offer(i: int) -> None:
        if shares[i] < caps[i]:
            heappush(gains, (time_of(i, shares[i] + 1), i, shares[i] + 1))
        if shares[i] > minima[i]:
            heappush(losses, (-time_of(i, shares[i]), i, shares[i]))

    for i in range(len(shares)):
        offer(i)
    while gains and losses:
        (gain, to, after), (loss, source, before) = gains[0], losses[0]
        if after != shares[to] + 1:
            heappop(gains)
        elif before != shares[source]:
            heappop(losses)
        elif gain >= -loss:
            return
        else:
            shares[to], shares[source] = shares[to] + 1, shares[source] - 1
            offer(to)
            offer(source)


def _highest(lines: Sequence[Sequence[Line]], replica: int, samples: int) -> Seconds:
    return max([line.intercept + line.slope * samples for line in lines[replica]])


def samples_below(level: Seconds, lines: Sequence[Line], low: int, high: int) -> int:
    """Most samples whose time is at most ``level``, within bounds; up to rounding."""
    room: float = high
    for line in lines:
        if line.slope > 0:
            room = min(room, (level - line.intercept) / line.slope)
        elif line.intercept > level:
            return low
    return max(low, math.floor(room))


def _water_level(
    total: int, lines: Sequence[Sequence[Line]], minima: Sequence[int], caps: Sequence[int]
) -> Seconds:
    """The time at which the real-valued shares add up to ``total``: a sweep over the bends of all curves."""
    bends: list[
        tuple[Seconds, float, float]
    ] = []  # (time, samples that join at once, change of samples a second)
    for one in zip(lines, minima, caps, strict=True):
        for (t, b), (t_next, b_next) in pairwise(bends_of(*one)):
            if t_next - t > _ROUNDING * abs(t):  # else a rate so large that it would drown the others
                rate = (b_next - b) / (t_next - t)
                bends += ((t, 0.0, rate), (t_next, 0.0, -rate))
            else:
                bends.append((t, b_next - b, 0.0))
    bends.sort()
    level, have, rate = -math.inf, float(sum(minima)), 0.0
    for time, jump, change in bends:
        if rate > 0 and have + rate * (time - level) >= total:
            return level + (total - have) / rate
        have += (rate * (time - level) if rate > 0 else 0.0) + jump
        level, rate = time, rate + change
        if have >= total:
            return level
    return level


def bends_of(lines: Sequence[Line], low: int, high: int) -> Iterator[tuple[Seconds, float]]:
    """Corners (seconds, samples) of the highest of ``lines``, from ``low`` samples to ``high``."""
    at: float = low
    line = max(lines, key=lambda x: (x.at(low), x.slope))
    yield line.at(at), at
    while steeper := [x for x in lines if x.slope > line.slope]:
        at, _, crossing = min(
            ((line.intercept - x.intercept) / (x.slope - line.slope), -x.slope, x) for x in steeper
        )
        if at >= high:
            break
        line = crossing
        yield line.at(at), at
    yield line.at(high), high


def _refuse_falling(lines: Sequence[Sequence[Line]]) -> None:
    for i, mine in enumerate(lines):
        if not mine:
            raise UsageError(f"replica {i} has no line; give at least one")
        for line in mine:
            if not (math.isfinite(line.intercept) and math.isfinite(line.slope) and line.slope >= 0):
                raise UsageError(
                    f"replica {i} has {line}; an intercept is finite, a slope finite and at least 0"
                )


def _refuse_impossible(total: int, minima: Sequence[int], caps: Sequence[int], count: int) -> None:
    if not len(minima) == len(caps) == count:
        raise UsageError(f"{count} replicas, but {len(minima)} minima and {len(caps)} caps")
    for i, (low, high) in enumerate(zip(minima, caps, strict=True)):
        if not 0 <= low <= high:
            raise NoFeasiblePlanError(
                f"replica {i} must take {low} samples or more and can take at most {high}"
            )
    if total < sum(minima):
        raise NoFeasiblePlanError(f"{total} samples are too few: the replicas take at least {sum(minima)}")
    if total > sum(caps):
        raise NoFeasiblePlanError(f"{total} samples are too many: the replicas take at most {sum(caps)}")
