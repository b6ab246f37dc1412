"""The shortest step as a function of the total batch: piecewise linear, found in one sweep."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from ..plan.shares import Line, bends_of
from ..units import Seconds


@dataclass(frozen=True, slots=True)
class Corner:
    """A bend of the curve."""

    samples: float
    seconds: Seconds


def best_times(
    lines: Sequence[Sequence[Line]], minima: Sequence[int], caps: Sequence[int]
) -> tuple[Corner, ...]:
    """Corners of T*(B), the least time of the slowest replica for real-valued shares of B samples.

    From Σ minima to Σ caps. Where a minimum binds its replica takes longer than the water level: the curve
    starts flat. O(n log n) for n replicas of a few lines.
    """
    low, high = float(sum(minima)), float(sum(caps))
    floor = max(
        (max(line.at(least) for line in mine) for mine, least in zip(lines, minima, strict=True) if least),
        default=-math.inf,
    )
    found = list(_corners(lines, minima, caps))
    flat = [one for one in found if one.seconds <= floor]
    rising = [one for one in found if one.seconds > floor]
    if not flat:
        return (Corner(low, rising[0].seconds), *rising)
    if not rising:
        return Corner(low, floor), Corner(high, floor)
    return Corner(low, floor), Corner(_between(flat[-1], rising[0], floor), floor), *rising


def _between(a: Corner, b: Corner, seconds: Seconds) -> float:
    return a.samples + (b.samples - a.samples) * (seconds - a.seconds) / (b.seconds - a.seconds)


def _corners(lines: Sequence[Sequence[Line]], minima: Sequence[int], caps: Sequence[int]) -> Iterator[Corner]:
    """Samples that all replicas together have done by each time at which one of their lines bends."""
    have, rate, now = float(sum(minima)), 0.0, -math.inf
    for seconds, events in groupby(sorted(_events(lines, minima, caps)), key=lambda event: event[0]):
        have += rate * (seconds - now) if rate > 0 else 0.0
        now = seconds
        yield Corner(have, seconds)
        for _, jump, change in events:
            have, rate = have + jump, rate + change
        yield Corner(have, seconds)


def _events(
    lines: Sequence[Sequence[Line]], minima: Sequence[int], caps: Sequence[int]
) -> Iterator[tuple[Seconds, float, float]]:
    """(time, samples that join at once, change of samples a second)."""
    for one in zip(lines, minima, caps, strict=True):
        for (t, b), (t_next, b_next) in pairwise(bends_of(*one)):
            if t_next - t > 1e-12 * abs(t):  # else a rate so large that it would drown the others
                rate = (b_next - b) / (t_next - t)
                yield t, 0.0, rate
                yield t_next, 0.0, -rate
            else:
                yield t, b_next - b, 0.0
