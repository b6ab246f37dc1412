"""When buckets are complete and how long their reduction takes, learnt from what all replicas saw."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..errors import UsageError
from ..units import Seconds
from .lines import Floats, Marks
from .state import BucketState

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
    """For each bucket the seconds to its end since its issue, or since the end of the one before if that came
    later; as seen here, with waits for slower replicas."""


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
        self._count = np.zeros((num_replicas, 1))
        self._mean = np.zeros((num_replicas, num_buckets))
        self._variance = np.full((num_replicas, num_buckets), _LEAST_DEVIATION**2)
        self._reductions: deque[list[Seconds]] = deque(maxlen=_WINDOW_READINGS)

    @property
    def state(self) -> BucketState:
        """For a checkpoint."""
        return BucketState(
            count=tuple(self._count[:, 0].tolist()),
            mean=tuple(map(tuple, self._mean.tolist())),
            variance=tuple(map(tuple, self._variance.tolist())),
            reductions_s=tuple(map(tuple, self._reductions)),
        )

    def resume(self, state: BucketState) -> None:
        """Go on where another one was, of as many replicas and buckets."""
        self._count = np.array(state.count).reshape(self._count.shape)
        self._mean = np.array(state.mean).reshape(self._mean.shape)
        self._variance = np.array(state.variance).reshape(self._variance.shape)
        self._reductions = deque(map(list, state.reductions_s), maxlen=_WINDOW_READINGS)

    def observe(self, readings: Sequence[Reading]) -> None:
        """Learn from one step."""
        ready = np.minimum(np.array([one.ready for one in readings]), 1.0)
        backward_s = np.array([one.backward_s for one in readings])
        took = np.array([bool(one.samples) for one in readings]) & (backward_s > 0)
        self._learn_ready(ready, took[:, None])
        self._reductions.append(
            [min(seconds) for seconds in zip(*(one.reduce_s for one in readings), strict=True)]
        )

    @property
    def ready(self) -> tuple[float, ...]:
        """The inverse-variance mean over replicas."""
        weights = np.minimum(self._count, self._memory) / self._variance
        return tuple(map(_weighted_mean, self._mean.T.tolist(), weights.T.tolist()))

    @property
    def reduce_s(self) -> tuple[Seconds, ...]:
        """The median over the last steps of the minimum over replicas: who came last did not wait."""
        return tuple(map(median, zip(*self._reductions, strict=True)))

    def _learn_ready(self, ready: Floats, took: Marks) -> None:
        """Means and variances with forgetting, both (replicas, buckets); far off: as three deviations."""
        self._count = self._count + took
        share = np.where(took, 1 / np.minimum(np.maximum(self._count, 1.0), self._memory), 0.0)
        error = ready - self._mean
        limit = np.where(self._count > 2, 3 * np.sqrt(self._variance) + _LEAST_DEVIATION, np.inf)
        error = np.minimum(np.maximum(error, -limit), limit)
        self._mean = self._mean + share * error
        moved = self._variance + share * (error * error - self._variance)
        self._variance = np.where(
            took & (self._count > 1), np.maximum(moved, _LEAST_DEVIATION**2), self._variance
        )


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """1 where nothing has weight: a bucket that nobody computed for is complete at the end."""
    whole = math.fsum(weights)
    return math.fsum(w * x for w, x in zip(weights, values, strict=True)) / whole if whole else 1.0
