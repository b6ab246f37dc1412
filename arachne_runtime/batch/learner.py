"""The time model of a group of replicas, learnt from their readings step by step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..plan.shares import Line
from ..units import Seconds
from .buckets import BucketFits, Reading
from .lines import Floats, LineFits
from .state import LearnerState
from .time_model import ReplicaTime, TimeModel


class Learner:
    """Two lines a replica and K buckets; leaves out readings while things warm up."""

    def __init__(self, num_replicas: int, *, memory: float, warmup_steps: int) -> None:
        """Nothing is known; ``memory`` and ``warmup_steps`` are in readings."""
        self._n, self._memory, self._warmup_steps = num_replicas, memory, warmup_steps
        self._fits = LineFits(2 * num_replicas, memory=memory)  # outside and backward: one pass over arrays
        self._num_buckets, self._skip = 0, warmup_steps
        self._buckets = BucketFits(num_replicas, 0, memory=memory)
        self._last: tuple[int, ...] = ()
        self._skipped = [False] * num_replicas
        self.drifted = False
        """Whether a line moved with the last readings."""

    @property
    def state(self) -> LearnerState:
        """For a checkpoint."""
        return LearnerState(
            num_buckets=self._num_buckets,
            skip=self._skip,
            last=self._last,
            skipped=tuple(self._skipped),
            drifted=self.drifted,
            fits=self._fits.state,
            buckets=self._buckets.state,
        )

    def resume(self, state: LearnerState) -> None:
        """Go on where another one was, of as many replicas."""
        self._num_buckets, self._skip = state.num_buckets, state.skip
        self._last, self._skipped, self.drifted = state.last, list(state.skipped), state.drifted
        self._fits.resume(state.fits)
        self._buckets = BucketFits(self._n, self._num_buckets, memory=self._memory)
        self._buckets.resume(state.buckets)

    def observe(self, readings: Sequence[Reading]) -> bool:
        """Learn from one step; False where it was left out (DDP builds its buckets anew after one)."""
        readings = [_with_a_bucket(one) for one in readings]
        settled = self._settled(tuple(one.samples for one in readings))
        if self._num_buckets != len(readings[0].ready):
            self._num_buckets, self._skip = len(readings[0].ready), self._warmup_steps
            self._buckets = BucketFits(self._n, self._num_buckets, memory=self._memory)
        if self._skip:
            self._skip -= 1
            return False
        samples = np.array([float(one.samples) for one in readings] * 2)
        seconds = [one.outside_s for one in readings] + [one.backward_s for one in readings]
        drifted = self._fits.observe(samples, np.array(seconds), np.array(settled * 2))
        self._buckets.observe(readings)
        self.drifted = bool(drifted.any())
        return True

    def model(self) -> TimeModel:
        """What is known now; a replica that never had samples is taken for the middle one of the others."""
        lines, measured = self._fits.lines(), self._fits.measured.tolist()
        outside = _with_guesses(lines[: self._n], measured[: self._n])
        backward = _with_guesses(lines[self._n :], measured[self._n :])
        replicas = (ReplicaTime(outside=a, backward=p) for a, p in zip(outside, backward, strict=True))
        return TimeModel(replicas=tuple(replicas), ready=self._buckets.ready, reduce_s=self._buckets.reduce_s)

    @property
    def noise(self) -> float:
        """Relative deviation of a reading, of the middle line."""
        return float(np.median(self._fits.noise))

    def slope_doubts(self, shares: Sequence[int]) -> list[float]:
        """For each replica the deviation of its slopes, times its share, over its compute."""
        samples = self._samples(shares)
        deviation = np.sqrt(self._both(self._fits.variance_of_slope())) * samples[: self._n]
        return (deviation / self._both(self._fits.at(samples))).tolist()  # type: ignore[no-any-return]

    def doubt_s(self, shares: Sequence[int]) -> Seconds:
        """Deviation of the predicted compute at these shares, of the least known replica that has one."""
        deviation = np.sqrt(self._both(self._fits.variance_at(self._samples(shares))))
        return max([x for x, share in zip(deviation.tolist(), shares, strict=True) if share], default=0.0)

    def _samples(self, shares: Sequence[int]) -> Floats:
        return np.array([float(max(share, 1)) for share in shares] * 2)

    def _both(self, values: Floats) -> Floats:
        """Outside and backward together."""
        return values[: self._n] + values[self._n :]

    def _settled(self, samples: tuple[int, ...]) -> list[bool]:
        """Whether a reading counts: the first one at another share (caches, kernels) does not."""
        changed = [a != b for a, b in zip(samples, self._last or samples, strict=True)]
        self._skipped = [new and not old for new, old in zip(changed, self._skipped, strict=True)]
        self._last = samples
        return [not skipped for skipped in self._skipped]


def _with_a_bucket(reading: Reading) -> Reading:
    """Where nothing was reduced: one empty bucket at the end."""
    return reading if reading.ready else replace(reading, ready=(1.0,), reduce_s=(0.0,))


def _with_guesses(lines: Sequence[Line], measured: Sequence[bool]) -> tuple[Line, ...]:
    """The middle line instead of those that are not known."""
    known = [line for line, seen in zip(lines, measured, strict=True) if seen] or [Line(0.0, 1.0)]
    middle = sorted(known, key=lambda line: (line.slope, line.intercept))[len(known) // 2]
    return tuple(line if seen else middle for line, seen in zip(lines, measured, strict=True))
