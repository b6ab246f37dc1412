"""When buckets are complete and how long their reduction takes, learnt from what all replicas saw."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..errors import UsageError
from ..units import Seconds

_WINDOW_READINGS = 15
"""Steps over which the times of reductions are a median: a slower network is seen within eight."""
_LEAST_DEVIATION = 1e-3
"""Deviation of a ready fraction below which none is believed, else one replica would outvote all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One replica in one step, in seconds of its own clock; every rank has the readings of all replicas."""

    samples: int
    outside_s: Seconds
    """Load, forward and update: what it computed outside the backward, without waiting for others."""
    backward_s: Seconds
    """The backward's computing, without waiting for reductions."""
    ready: tuple[float, ...]
    """For each bucket, as they are issued, the fraction of the backward at which it was complete."""
    reduce_s: tuple[Seconds, ...]
    """For each bucket the seconds from its issue to its end as seen here, with waits for slower replicas."""


def check_readings(readings: Sequence[Reading], num_replicas: int) -> None:
    """UsageError unless there is one reading a replica, of equal buckets, finite and not below zero."""
    if len(readings) != num_replicas:
        raise UsageError(f"{len(readings)} readings for {num_replicas} replicas; give one of each")
    for i, one in enumerate(readings):
        if not len(one.ready) == len(one.reduce_s) == len(readings[0].ready):
            raise UsageError(
                f"replica {i} has {len(one.ready)} ready fractions and {len(one.reduce_s)} reduction times, "
                f"replica 0 has {len(readings[0].ready)} buckets; they must agree"
            )
        values = (one.samples, one.outside_s, one.backward_s, *one.ready, *one.reduce_s)
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise UsageError(f"replica {i} has the reading {one}; all its figures are finite and at least 0")


class BucketFits:
    """Ready fractions (φ) and reduction times (c) of K buckets."""

    def __init__(self, num_replicas: int, num_buckets: int, *, memory: float) -> None:
        """Nothing is known; ``memory`` is in readings."""
        self._memory = memory
        self._count = [0] * num_replicas
        self._mean = [[0.0] * num_buckets for _ in range(num_replicas)]
        self._variance = [[_LEAST_DEVIATION**2] * num_buckets for _ in range(num_replicas)]
        self._reductions: deque[tuple[Seconds, ...]] = deque(maxlen=_WINDOW_READINGS)

    def observe(self, readings: Sequence[Reading]) -> None:
        """Learn from one step."""
        for i, one in enumerate(readings):
            if one.samples and one.backward_s:
                self._learn_ready(i, one.ready)
        alone = zip(*(_reductions_alone(one) for one in readings), strict=True)
        self._reductions.append(tuple(map(min, alone)))

    @property
    def ready(self) -> tuple[float, ...]:
        """The inverse-variance mean over replicas."""
        means = zip(*self._mean, strict=True)
        variances = zip(*self._variance, strict=True)
        return tuple(map(self._pooled, means, variances))

    @property
    def reduce_s(self) -> tuple[Seconds, ...]:
        """The median over the last steps of the minimum over replicas: who came last did not wait."""
        return tuple(map(median, zip(*self._reductions, strict=True)))

    def _learn_ready(self, replica: int, ready: Sequence[float]) -> None:
        self._count[replica] += 1
        share = 1 / min(self._count[replica], self._memory)
        means, variances = self._mean[replica], self._variance[replica]
        for k, value in enumerate(ready):
            error = min(value, 1.0) - means[k]
            if self._count[replica] > 2:  # far off: as three deviations
                limit = 3 * math.sqrt(variances[k]) + _LEAST_DEVIATION
                error = min(max(error, -limit), limit)
            means[k] += share * error
            if self._count[replica] > 1:
                new = variances[k] + share * (error * error - variances[k])
                variances[k] = max(new, _LEAST_DEVIATION**2)

    def _pooled(self, means: Sequence[float], variances: Sequence[float]) -> float:
        weights = [min(n, self._memory) / v for n, v in zip(self._count, variances, strict=True)]
        return math.fsum(w * m for w, m in zip(weights, means, strict=True)) / math.fsum(weights)


def _reductions_alone(one: Reading) -> tuple[Seconds, ...]:
    """Each bucket's seconds from its issue or its predecessor's end, the later one, to its own end."""
    found, before = [], 0.0
    for fraction, seconds in zip(one.ready, one.reduce_s, strict=True):
        issued = min(fraction, 1.0) * one.backward_s
        end = issued + seconds
        found.append(max(0.0, end - max(issued, before)))
        before = max(before, end)
    return tuple(found)
