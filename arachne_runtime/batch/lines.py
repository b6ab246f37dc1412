"""Lines of seconds in samples, learnt from noisy readings: robust recursive least squares that follow drifts.

All replicas are learnt side by side in arrays, by arithmetic on elements only: every machine gets the same
bits from the same readings, which sums over arrays or logarithms of another build of NumPy would not give.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..plan.shares import Line
from .state import FitState, Row

Floats: TypeAlias = NDArray[np.float64]
Marks: TypeAlias = NDArray[np.bool_]
Keep: TypeAlias = Callable[[Floats, Floats], Floats]
"""(new, old) → the values that are kept."""

_TINY_S = 1e-6
"""Seconds below which a reading counts as this: it decides nothing."""
_LEAST_DETERMINANT = 1e-9
"""Determinant of the information, over the product of its diagonal, below which rounding rules it."""
_PRIOR_READINGS = 0.01
"""Weight, in readings, of the guess that no samples take no time; makes the first line proportional."""
_PRIOR_NOISE = 0.05
"""Relative deviation of a reading that is assumed at first, with the weight of some readings."""
_PRIOR_NOISE_READINGS = 2.0
_LEAST_NOISE = 1e-3
"""Relative deviation below which readings are not believed: the lines are a model."""
_NOISE_READINGS = 50.0
"""Readings over which the deviation is averaged."""
_HUBER = 2.0
"""Deviations beyond which a reading counts less (Huber 1964)."""
_SLACK, _CLIP, _ALARM = 0.5, 5.0, 12.0
"""A two-sided CUSUM (Page 1954) in deviations: slack of a reading, most that one reading adds, alarm.

Three readings that are far off on one side are a drift; one or two are outliers. Normal noise alone gives an
alarm in about 10^6 readings.
"""
_AFTER_ALARM_READINGS = 3.0
"""What is known after an alarm, in readings: the ratio that was seen is the median of so many."""


@dataclass(slots=True)
class _Information:
    """Symmetric 2 × 2 matrices ``[[a, b], [b, c]]`` of least squares, one a replica, in relative readings."""

    a: Floats
    b: Floats
    c: Floats

    def leverage(self, x: Floats, y: Floats) -> Floats:
        """Variance of the line's value at a row, in those of a reading."""
        u, v = self.solve(x, y)
        return x * u + y * v

    def solve(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        det = self.a * self.c - self.b * self.b
        return (self.c * x - self.b * y) / det, (self.a * y - self.b * x) / det


class LineFits:
    """``seconds = intercept + slope * samples`` for each of n replicas.

    Noise is relative to the reading. Old readings are forgotten only in the direction in which new ones tell
    something (directional forgetting, Kulhavý 1987): a constant share does not unlearn the slope.
    """

    def __init__(self, num_replicas: int, *, memory: float) -> None:
        """Nothing is known; ``memory`` is in readings."""
        self._forget = 1 / memory
        self._intercept, self._slope = np.zeros(num_replicas), np.zeros(num_replicas)
        self._known = _Information(*(np.zeros(num_replicas) for _ in range(3)))
        self._variance = np.full(num_replicas, _PRIOR_NOISE**2)
        self._count = np.zeros(num_replicas)
        self._above, self._below = np.zeros(num_replicas), np.zeros(num_replicas)
        self._ratios = [np.ones(num_replicas) for _ in range(3)]

    @property
    def state(self) -> FitState:
        """For a checkpoint."""
        known = (self._known.a, self._known.b, self._known.c)
        return FitState(
            intercept=tuple(self._intercept.tolist()),
            slope=tuple(self._slope.tolist()),
            information=_rows(known),
            variance=tuple(self._variance.tolist()),
            count=tuple(self._count.tolist()),
            above=tuple(self._above.tolist()),
            below=tuple(self._below.tolist()),
            ratios=_rows(self._ratios),
        )

    def resume(self, state: FitState) -> None:
        """Go on where another one was."""
        self._intercept, self._slope = np.array(state.intercept), np.array(state.slope)
        self._known = _Information(*(np.array(row) for row in state.information))
        self._variance, self._count = np.array(state.variance), np.array(state.count)
        self._above, self._below = np.array(state.above), np.array(state.below)
        self._ratios = [np.array(row) for row in state.ratios]

    @property
    def measured(self) -> Marks:
        """Which replicas had a reading."""
        return self._count > 0

    def observe(self, samples: Floats, seconds: Floats, fresh: Marks) -> Marks:
        """Learn from one reading of each replica that is ``fresh`` and has samples; which ones drifted."""
        fresh = fresh & (samples > 0)
        seconds = np.maximum(seconds, _TINY_S)
        measured = self.measured
        self._begin(samples, seconds, fresh & ~measured)
        with np.errstate(all="ignore"):  # replicas without a reading are computed along, and not kept
            drifted = self._learn(samples, seconds, fresh & measured)
            self._begin(samples, seconds, fresh & ~self._sound())
        self._count = self._count + fresh
        return drifted

    @property
    def noise(self) -> Floats:
        """Relative deviation of a reading."""
        deviation: Floats = np.sqrt(self._variance)
        return deviation

    def lines(self) -> tuple[Line, ...]:
        """The likeliest lines that neither start below zero nor fall; of unmeasured replicas: nonsense."""
        with np.errstate(all="ignore"):
            low = self._intercept < 0
            slope = np.where(low, self._slope + self._known.b / self._known.c * self._intercept, self._slope)
            fall = slope < 0
            intercept = np.where(
                fall, self._intercept + self._known.b / self._known.a * self._slope, self._intercept
            )
        pairs = zip(np.maximum(intercept, 0.0).tolist(), np.maximum(slope, 0.0).tolist(), strict=True)
        return tuple(Line(a, b) for a, b in pairs)

    def at(self, samples: Floats) -> Floats:
        """Seconds of the fitted lines."""
        return np.maximum(self._intercept + self._slope * samples, _TINY_S)

    def variance_of_slope(self) -> Floats:
        """Square of the standard deviation of each slope, in seconds² a sample²; unmeasured: infinite."""
        with np.errstate(all="ignore"):
            _, across = self._known.solve(np.zeros_like(self._slope), np.ones_like(self._slope))
        return np.where(self.measured, self._variance * across, np.inf)

    def variance_at(self, samples: Floats) -> Floats:
        """Square of the standard deviation of the line at ``samples``, in seconds²; unmeasured: infinite."""
        with np.errstate(all="ignore"):
            x, y = self._known.solve(np.ones_like(samples), samples)
        return np.where(self.measured, self._variance * (x + samples * y), np.inf)

    def _begin(self, samples: Floats, seconds: Floats, first: Marks) -> None:
        """Start with this reading: a line through the origin."""
        if not first.any():  # as in all steps but a few
            return
        b = np.where(first, samples, 1.0)
        self._intercept = np.where(first, 0.0, self._intercept)
        weight = 1 / (seconds * seconds)
        self._slope = np.where(first, seconds / b, self._slope)
        for name, value in (("a", weight * (1 + _PRIOR_READINGS)), ("b", weight * b), ("c", weight * b * b)):
            setattr(self._known, name, np.where(first, value, getattr(self._known, name)))

    def _learn(self, samples: Floats, seconds: Floats, fresh: Marks) -> Marks:
        predicted = self.at(samples)
        x, y = 1 / predicted, samples / predicted
        error = seconds / predicted - 1
        leverage = self._known.leverage(x, y)
        doubt = 1 + leverage  # variance of the error in those of a reading
        off = error / np.sqrt(self._variance * doubt)
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(off), _HUBER))
        keep = _keeper(fresh)
        self._update(x, y, error, weight * (1 - self._forget / leverage), weight, keep)
        self._spread(error * error / doubt, keep)
        oldest, older, last = self._ratios
        self._ratios = [keep(new, old) for new, old in ((older, oldest), (last, older), (1 + error, last))]
        near_log = off / (1 + error / 2)  # as far off at a third of the time as at three times of it
        drifted = fresh & self._alarm(near_log, keep)
        self._restart(samples, drifted)
        return drifted

    def _sound(self) -> Marks:
        """Where the figures can be computed with: readings of wildly different sizes spoil them."""
        known = self._known
        apart = known.a * known.c - known.b * known.b > _LEAST_DETERMINANT * known.a * known.c
        return apart & np.isfinite(self._intercept) & np.isfinite(self._slope) & np.isfinite(known.c)

    def _update(self, x: Floats, y: Floats, error: Floats, more: Floats, weight: Floats, keep: Keep) -> None:
        """Learn from a row (x, y); ``more`` is what it adds less what is forgotten of the same direction."""
        known = self._known
        new = _Information(known.a + more * x * x, known.b + more * x * y, known.c + more * y * y)
        u, v = new.solve(weight * error * x, weight * error * y)
        self._intercept = keep(self._intercept + u, self._intercept)
        self._slope = keep(self._slope + v, self._slope)
        self._known = _Information(keep(new.a, known.a), keep(new.b, known.b), keep(new.c, known.c))

    def _spread(self, square: Floats, keep: Keep) -> None:
        """Average the squared relative deviation of readings; one far off counts as three deviations."""
        share = 1 / (np.minimum(self._count, _NOISE_READINGS) + _PRIOR_NOISE_READINGS)
        seen = np.minimum(square, 9 * self._variance)
        new = np.maximum(self._variance + share * (seen - self._variance), _LEAST_NOISE**2)
        self._variance = keep(new, self._variance)

    def _alarm(self, off: Floats, keep: Keep) -> Marks:
        step = np.minimum(np.maximum(off, -_CLIP), _CLIP)
        self._above = keep(np.maximum(self._above + step - _SLACK, 0.0), self._above)
        self._below = keep(np.maximum(self._below - step - _SLACK, 0.0), self._below)
        return np.maximum(self._above, self._below) > _ALARM

    def _restart(self, samples: Floats, drifted: Marks) -> None:
        """The whole line moves by the ratio that was seen, and is known as badly as that ratio."""
        if not drifted.any():
            return
        predicted = self.at(samples)
        readings = 1 / self._known.leverage(1 / predicted, samples / predicted)
        ratio = np.where(drifted, np.maximum(np.median(np.stack(self._ratios), axis=0), 1e-3), 1.0)
        self._intercept, self._slope = self._intercept * ratio, self._slope * ratio
        kept = _AFTER_ALARM_READINGS / np.maximum(readings, _AFTER_ALARM_READINGS) / (ratio * ratio)
        kept = np.where(drifted, kept, 1.0)
        self._known = _Information(self._known.a * kept, self._known.b * kept, self._known.c * kept)
        self._above, self._below = (np.where(drifted, 0.0, g) for g in (self._above, self._below))


def _keeper(fresh: Marks) -> Keep:
    """Takes new values where ``fresh``, old ones elsewhere: as a rule all are, in every step."""
    if fresh.all():
        return lambda new, old: new
    return lambda new, old: np.where(fresh, new, old)


def _rows(arrays: Iterable[Floats]) -> tuple[Row, Row, Row]:
    a, b, c = (tuple(array.tolist()) for array in arrays)
    return a, b, c
