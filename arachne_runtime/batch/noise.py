"""Gradient noise scale of a step from squared norms of unequal groups of its samples.

The general closed form (derived: docs/unequal-batches.md). For each segment, for groups j of the batch with
summed gradients h_j, weights c_j and variance units ν_j, and without index their sums:

    κ = Σ_segments [ Σ_j |h_j|²/c_j − |h|²/C ] / (Σ_j ν_j/c_j − ν/C)
    noise = κ ν / C², signal = |h|²/C² − noise, noise scale = samples · noise / signal

With equal groups it is the estimate of McCandlish et al. (arXiv 1812.06162, appendix A); with unequal ones
its weights have least variance where the noise is Gaussian and ν = c.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError

_SAME = 1e-6
"""Relative difference of two sums over the same batch that is rounding: weights may come in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Some samples of a batch whose gradients were summed before anything else: a replica's, a micro-batch's.

    Groups must be exchangeable: drawn alike from the data. Groups of alike samples (length buckets, shards of
    a sorted set) make the noise look larger than it is.
    """

    weight: float
    """Samples or tokens, c_j; 0: the group is skipped."""
    squared_norm: float
    """|h_j|² of the summed gradient, neither divided by a count nor by a weight."""
    variance_units: float | None = None
    """ν_j: None for the weight (samples, tokens that are independent); the number of samples where a sample's
    noise does not grow with its tokens; Σ (tokens of a sample)² where its tokens move together."""

    @property
    def variance(self) -> float:
        """ν_j."""
        return self.weight if self.variance_units is None else self.variance_units


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentNorms:
    """Groups of one segment (parameters that are summed over the same groups), and the whole batch."""

    groups: Sequence[Group]
    squared_norm: float
    """|h|² of the sum over all groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReading:
    """What one step tells, without bias; ``signal`` may be negative in a single step: ``NoiseAverage``."""

    samples: int
    """Samples of the batch."""
    noise: float
    """Expected |g − E g|² of this batch's mean gradient g."""
    signal: float
    """|E g|², the squared norm of the true gradient."""
    trace: float
    """Noise of a batch of one sample, drawn with replacement."""

    @property
    def noise_scale(self) -> float:
        """Samples at which noise and signal are equal (φ); infinite where no signal is seen."""
        return self.trace / self.signal if self.signal > 0 else math.inf


def measure_noise(
    segments: Sequence[SegmentNorms], *, samples: int, population: int | None = None
) -> NoiseReading:
    """The noise of a batch of ``samples`` that was cut into groups, in any way in each segment.

    Norms may be taken in a preconditioned space, the same one for all groups (for Adam: each gradient divided
    by √v̂ + ε); then noise and signal are in that space. Where the loss was divided by C already, multiply all
    squared norms by C². A norm counts each parameter once: stages and shards are added, tied copies before.

    Args:
        segments: One entry for each set of parameters with groups of its own.
        samples: Samples of the whole batch.
        population: Samples of the data set, where the batch was drawn from it without replacement.

    Raises:
        UsageError: Fewer than two groups in a segment, segments of different batches, weights below zero.

    """
    kept = [[group for group in one.groups if group.weight > 0] for one in segments]
    _refuse_wrong(segments, kept, samples, population)
    weight = math.fsum(group.weight for group in kept[0])
    variance = math.fsum(group.variance for group in kept[0])
    kappa = math.fsum(
        _kappa(groups, one.squared_norm, weight, variance) for groups, one in zip(kept, segments, strict=True)
    )
    square = math.fsum(one.squared_norm for one in segments) / weight**2
    with_replacement = kappa * variance / weight**2
    noise = with_replacement * (1 - samples / population if population else 1.0)
    return NoiseReading(samples=samples, noise=noise, signal=square - noise, trace=samples * with_replacement)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSums:
    """Sums over groups, which add up over ranks: all that is needed of the groups of other ranks."""

    num_groups: int
    samples: float
    weight: float
    """Σ c_j."""
    variance: float
    """Σ ν_j."""
    ratio: float
    """Σ ν_j / c_j."""
    apart: tuple[float, ...]
    """Σ |h_j|² / c_j, by parameter group."""
    tails: tuple[float, ...] = ()
    """Σ of what ``tails.tail_sums`` gives; none: noise is taken for Gaussian."""

    @classmethod
    def of(cls, parts: Sequence["NoiseSums"]) -> "NoiseSums":
        """Over all ranks."""
        return cls(
            num_groups=sum(one.num_groups for one in parts),
            samples=math.fsum(one.samples for one in parts),
            weight=math.fsum(one.weight for one in parts),
            variance=math.fsum(one.variance for one in parts),
            ratio=math.fsum(one.ratio for one in parts),
            apart=tuple(map(math.fsum, zip(*(one.apart for one in parts), strict=True))),
            tails=tuple(map(math.fsum, zip(*(one.tails for one in parts), strict=True))),
        )

    def readings(self, squared_norms: Sequence[float]) -> tuple[NoiseReading, ...]:
        """By parameter group; none from fewer than two groups.

        As ``measure_noise``, of one segment, but an overflow (no number) is told and not refused.

        Args:
            squared_norms: |h|² of the sum over all groups, by parameter group.

        """
        if self.num_groups < 2:
            return ()
        divisor = self.ratio - self.variance / self.weight
        pairs = zip(self.apart, squared_norms, strict=True)
        return self.readings_of([(a - h / self.weight) / divisor for a, h in pairs], squared_norms)

    def readings_of(
        self, kappas: Sequence[float], squared_norms: Sequence[float]
    ) -> tuple[NoiseReading, ...]:
        """By parameter group, where κ, the trace of the covariance, is known."""
        return tuple(self._reading(*pair) for pair in zip(kappas, squared_norms, strict=True))

    def _reading(self, kappa: float, square: float) -> NoiseReading:
        noise = kappa * self.variance / self.weight**2
        return NoiseReading(
            samples=round(self.samples),
            noise=noise,
            signal=square / self.weight**2 - noise,
            trace=self.samples * noise,
        )


def total(readings: Iterable[NoiseReading]) -> NoiseReading:
    """All parameter groups of one step together; UsageError for readings of different batches."""
    readings = list(readings)
    if len({one.samples for one in readings}) != 1:
        raise UsageError(
            f"readings of batches of {[one.samples for one in readings]} samples are of no one step"
        )
    return NoiseReading(
        samples=readings[0].samples,
        noise=math.fsum(one.noise for one in readings),
        signal=math.fsum(one.signal for one in readings),
        trace=math.fsum(one.trace for one in readings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseState:
    """What a ``NoiseAverage`` has learnt: plain numbers, for a checkpoint."""

    num_steps: int = 0
    weight: float = 0.0
    trace: float = 0.0
    signal: float = 0.0


class NoiseAverage:
    """Readings of many steps, numerator and denominator averaged each for itself, as their ratio has a bias.

    Weights fall by a factor of e in ``memory_steps``; the first readings are weighted rightly from the start.
    """

    def __init__(self, *, memory_steps: float = 100.0, least_steps: int = 10) -> None:
        """Nothing is known before ``least_steps`` readings."""
        if memory_steps < 1 or least_steps < 1:
            raise UsageError(f"memory_steps is {memory_steps}, least_steps {least_steps}; at least 1 each")
        self._keep = 1 - 1 / memory_steps
        self._least_steps = least_steps
        self.state = NoiseState()
        """May be set to what another one had."""

    def add(self, reading: NoiseReading) -> None:
        """One step's reading; what is not finite (a step that overflowed) is left out."""
        if not (math.isfinite(reading.trace) and math.isfinite(reading.signal)):
            return
        old = self.state
        weight = self._keep * old.weight + 1
        self.state = NoiseState(
            num_steps=old.num_steps + 1,
            weight=weight,
            trace=old.trace + (reading.trace - old.trace) / weight,
            signal=old.signal + (reading.signal - old.signal) / weight,
        )

    @property
    def trace(self) -> float:
        """Averaged noise of a batch of one sample."""
        return self.state.trace

    @property
    def signal(self) -> float:
        """Averaged squared norm of the true gradient."""
        return self.state.signal

    @property
    def noise_scale(self) -> float | None:
        """Samples at which noise and signal are equal; None while too few steps or no signal were seen."""
        if self.state.num_steps < self._least_steps or self.signal <= 0:
            return None
        return max(self.trace, 0.0) / self.signal


def _kappa(groups: Sequence[Group], squared_norm: float, weight: float, variance: float) -> float:
    apart = math.fsum(group.squared_norm / group.weight for group in groups) - squared_norm / weight
    return apart / (math.fsum(group.variance / group.weight for group in groups) - variance / weight)


def _refuse_wrong(
    segments: Sequence[SegmentNorms], kept: Sequence[Sequence[Group]], samples: int, population: int | None
) -> None:
    if not segments or samples < 1 or (population is not None and population < samples):
        raise UsageError(
            f"{len(segments)} segments of {samples} samples out of {population}; at least one of each, and "
            "no more samples than there are"
        )
    for s, (one, groups) in enumerate(zip(segments, kept, strict=True)):
        if len(groups) < 2:
            raise UsageError(
                f"segment {s} has {len(groups)} groups with weight; noise is seen between groups: give two "
                "or more (micro-batches of one replica will do)"
            )
        for group in one.groups:
            figures = (group.weight, group.variance, group.squared_norm)
            if group.weight < 0 or (group.weight > 0 and group.variance <= 0) or math.isnan(sum(figures)):
                raise UsageError(f"segment {s} has {group}; weight and variance units are positive numbers")
        sums = [(math.fsum(g.weight for g in x), math.fsum(g.variance for g in x)) for x in (groups, kept[0])]
        if not all(math.isclose(a, b, rel_tol=_SAME) for a, b in zip(*sums, strict=True)):
            raise UsageError(
                f"segment {s} has weight and variance units {sums[0]}, segment 0 {sums[1]}; "
                "both cut the same batch"
            )
