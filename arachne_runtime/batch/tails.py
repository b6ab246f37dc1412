"""The trace of the noise from unequal groups with heavy tails: weights, and which ones spread least.

For Gaussian noise the best weights are those of ``noise``. Else they depend on one number more, the tails
κ = (E|ξ|⁴ − (tr Σ)² − 2 tr Σ²) / tr Σ² of a sample's noise ξ. Of the estimates Σ a_k |g_k|² − |g|² with
Σ a_k = 1, p_k = c_k / C, n_k samples in group k and d_k = a_k − p_k², those of least variance have
d_k = (λ / n_k + μ) / V_k with V_k = 2 / n_k² + κ / n_k³ (derived: docs/unequal-batches.md). Norms of one step
do not tell κ, so estimates by several κ are followed side by side, and those that spread least from step to
step are taken: by earlier steps alone, which leaves each of them without bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .noise import NoiseReading, NoiseSums, total

TAILS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""κ by which estimates are followed, beside Gaussian weights: for κ between two of them, the nearer one's are
3 % from the best at most (four replicas of 1 to 8 samples with Student-t noise, bench.unequal_dp_numbers)."""
_MEMORY_STEPS = 1000.0
"""Over which spreads are averaged: of 300, 1,000 and 3,000 the best with Student-t noise of 5 degrees of
freedom, where they settle slowest."""
_LEAST_STEPS = 20
"""Seen before other weights than the Gaussian ones are taken."""
_LEAST_GAIN = 0.02
"""Part of the Gaussian weights' variance that others must save: less is chance."""
_MEAN_STEPS = 100.0
"""Over which the trace is averaged, beside which spreads are seen: it changes while a model trains."""
_HEAD, _OF_TAILS, _OF_TAILS_BY_GROUP = 2, 3, 2
"""How many sums there are: of all, by κ, and by κ and parameter group."""


def tail_sums(weight: float, samples: float, apart: Sequence[float]) -> list[float]:
    """What one group of samples adds to the sums that ``by_tails`` takes; all of them add up over groups.

    Args:
        weight: c_k.
        samples: n_k; the variance of the group's mean gradient is that of one sample's over n_k.
        apart: |h_k|² / c_k by parameter group.

    """
    own = [one / weight for one in apart]  # |g_k|²
    found = [weight**2, (weight**2 / samples) ** 2, *(weight**2 * square for square in own)]
    for tails in TAILS:
        sure = samples**3 / (2 * samples + tails)
        found += [sure, sure / samples, sure / samples**2]
        found += [sure * square for square in own] + [sure / samples * square for square in own]
    return found


def num_tail_sums(num_groups: int) -> int:
    """How many numbers ``tail_sums`` gives for so many parameter groups."""
    return _HEAD + num_groups + len(TAILS) * (_OF_TAILS + _OF_TAILS_BY_GROUP * num_groups)


def by_tails(sums: NoiseSums, squared_norms: Sequence[float]) -> list[tuple[NoiseReading, ...]]:
    """Readings by parameter group with the weights for each of ``TAILS``; none where groups are too few.

    Args:
        sums: Over all groups, with their ``tail_sums``.
        squared_norms: |h|² of the sum over all groups, by parameter group.

    """
    num_groups = len(squared_norms)
    squares, fourths, *rest = sums.tails
    apart = 1 - squares / sums.weight**2  # A = Σ d_k
    if sums.num_groups < 2 or apart <= 0:
        return []
    between = 2 * (
        (sums.variance / sums.weight**2) ** 2 - fourths / sums.weight**4
    )  # of products of two groups
    own, rest = rest[:num_groups], rest[num_groups:]
    size, found = _OF_TAILS + _OF_TAILS_BY_GROUP * num_groups, []
    for start in range(0, len(rest), size):
        sure, ratio, square, *norms = rest[start : start + size]
        slope, level = (apart**2 + between * sure) / (apart * ratio), -between / apart  # λ and μ
        divisor = slope * square + level * ratio
        numerators = [
            slope * by_ratio + level * norm + (mine - whole) / sums.weight**2
            for norm, by_ratio, mine, whole in zip(
                norms[:num_groups], norms[num_groups:], own, squared_norms, strict=True
            )
        ]
        found.append(sums.readings_of([one / divisor for one in numerators], squared_norms))
    return found


@dataclass(slots=True)
class Tails:
    """Which weights spread least so far; the same on every rank, as the sums are."""

    _spreads: list[float] | None = None
    """Summed squares of the change from step to step, by weights: the Gaussian ones, then ``TAILS``."""
    _last: Sequence[float] = ()
    _mean: float = 0.0
    _num_steps: int = 0

    @property
    def chosen(self) -> int:
        """0: Gaussian weights; else one more than the index in ``TAILS``."""
        if self._spreads is None or self._num_steps < _LEAST_STEPS:
            return 0
        least = min(self._spreads)
        return self._spreads.index(least) if least < (1 - _LEAST_GAIN) * self._spreads[0] else 0

    def readings(self, sums: NoiseSums, squared_norms: Sequence[float]) -> tuple[NoiseReading, ...]:
        """Of one step, by parameter group; none from fewer than two groups.

        Args:
            sums: Over all groups, with their ``tail_sums``.
            squared_norms: |h|² of the sum over all groups, by parameter group.

        """
        usual = sums.readings(squared_norms)
        if not usual or not sums.tails:
            return usual
        others = by_tails(sums, squared_norms)
        chosen = self.chosen if others else 0
        found = [usual, *others]
        if others:
            self.observe([total(one).trace for one in found])
        return found[chosen]

    def observe(self, traces: Sequence[float]) -> None:
        """Learn from one step's estimates: Gaussian, then by ``TAILS``."""
        self._num_steps += 1
        weight = 1 / min(self._num_steps, _MEAN_STEPS)
        self._mean += weight * (abs(traces[0]) - self._mean)
        if self._last and self._mean > 0:
            moved = [((new - old) / self._mean) ** 2 for new, old in zip(traces, self._last, strict=True)]
            self._spreads = [
                (1 - 1 / _MEMORY_STEPS) * old + new
                for old, new in zip(self._spreads or [0.0] * len(moved), moved, strict=True)
            ]
        self._last = tuple(traces)
