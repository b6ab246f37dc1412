"""The total batch of most goodput: throughput times what a sample of that batch is worth.

    goodput(B) = B / T*(B) · (φ + B₀) / (φ + B)

On a piece T* = α + βB it rises exactly while αφ > βB²: the best B is √(αφ/β) where that lies in the piece,
else an end of it; no grid is searched. T* is convex and goodput turns once, unless a replica may take no
samples: then T* bends down, or jumps, where it joins. With accumulation T* jumps, so each number of
micro-batches is solved for itself. Whole samples make goodput a saw: see ``_beside``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import NoFeasiblePlanError, UsageError
from ..plan.shares import Line, samples_below
from ..units import Seconds
from .curve import Corner, best_times
from .scaling import efficiency
from .time_model import TimeModel

_NUM_SLOW = 8
"""Replicas whose whole samples are looked at; the steps of the others are finer."""
_ROUNDING = 1e-12
"""Relative error of a level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A total batch, how it is shared, and what is expected of it."""

    batch: int
    accumulation: int
    """Micro-batches of a step."""
    shares: tuple[int, ...]
    """Samples of each replica in a step, over all its micro-batches."""
    step_s: Seconds
    goodput: float
    """Samples of a base batch a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProblem:
    """All that the best batch depends on."""

    model: TimeModel
    base_batch: int
    """The user's batch B₀, where a sample counts 1."""
    noise_scale: float
    """φ in samples; infinite: no signal in one batch, only throughput counts."""
    minima: Sequence[int]
    """For each replica the least samples of a micro-batch."""
    caps: Sequence[int]
    """For each replica the most samples of a micro-batch, finite."""
    least: int
    most: int
    """Bounds of the total batch."""
    max_accumulation: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or self.base_batch < 1 or self.max_accumulation < 1:
            raise UsageError(
                f"least {self.least}, most {self.most}, base batch {self.base_batch}, max_accumulation "
                f"{self.max_accumulation}: 1 ≤ least ≤ most, and at least 1"
            )
        if not self.noise_scale >= 0:
            raise UsageError(f"noise_scale is {self.noise_scale}; at least 0")

    def goodput(self, batch: float, step_s: Seconds) -> float:
        """Samples of a base batch a second."""
        worth = efficiency(batch, base_batch=self.base_batch, noise_scale=self.noise_scale)
        return batch / step_s * worth

    def choice(self, batch: int, accumulation: int) -> Choice:
        """The best shares of a given batch; NoFeasiblePlanError where it does not fit."""
        shares = self.model.best(batch, self.minima, self.caps, accumulation)
        step_s = self.model.step_s(shares, accumulation)
        return Choice(
            batch=batch,
            accumulation=accumulation,
            shares=shares,
            step_s=step_s,
            goodput=self.goodput(batch, step_s),
        )


def best_batch(problem: BatchProblem) -> Choice:
    """The choice of most goodput; of equal ones that of fewest micro-batches, then of fewest samples.

    Raises NoFeasiblePlanError where no batch within bounds fits the caps and minima.
    """
    choices = [problem.choice(batch, n) for batch, n in _candidates(problem)]
    if not choices:
        raise NoFeasiblePlanError(
            f"no batch of {problem.least} to {problem.most} samples fits: {problem.max_accumulation} "
            f"micro-batches of {sum(problem.minima)} to {sum(problem.caps)} samples"
        )
    return max(choices, key=lambda one: one.goodput)


def _candidates(problem: BatchProblem) -> Iterator[tuple[int, int]]:
    """Whole numbers beside the best real batch, for each number of micro-batches."""
    for n in range(1, problem.max_accumulation + 1):
        minima, caps = ([n * bound for bound in bounds] for bounds in (problem.minima, problem.caps))
        low, high = max(problem.least, sum(minima)), min(problem.most, sum(caps))
        if low <= high:
            lines = problem.model.lines(n)
            best = peak(best_times(lines, minima, caps), problem.noise_scale, low, high)
            whole = {math.floor(best.samples), math.ceil(best.samples), *_beside(best, lines, minima, caps)}
            yield from ((batch, n) for batch in sorted(whole) if low <= batch <= high)


def _beside(
    best: Corner, lines: Sequence[Sequence[Line]], minima: Sequence[int], caps: Sequence[int]
) -> Iterator[int]:
    """Batches at which a slow replica ends a whole sample just in time: one more would take long."""
    slow = sorted(range(len(lines)), key=lambda i: -max(line.slope for line in lines[i]))[:_NUM_SLOW]
    for i in slow:
        share = samples_below(best.seconds, lines[i], minima[i], caps[i])
        for whole in (share, share + 1):
            level = max(line.at(whole) for line in lines[i]) * (1 + _ROUNDING)
            yield sum(samples_below(level, *one) for one in zip(lines, minima, caps, strict=True))


def peak(corners: Sequence[Corner], noise_scale: float, low: float, high: float) -> Corner:
    """The real-valued batch from ``low`` to ``high`` of most goodput on a piecewise linear T*."""
    ends = [one for one in corners if low <= one.samples <= high]
    for a, b in pairwise(corners):
        if a.samples < b.samples:
            beta = (b.seconds - a.seconds) / (b.samples - a.samples)
            alpha = a.seconds - beta * a.samples
            inside = (max(low, a.samples), min(high, b.samples))
            at = [*inside, _turning(alpha, beta, noise_scale)]
            ends += [Corner(x, alpha + beta * x) for x in at if inside[0] <= x <= inside[1]]
    return max(ends, key=lambda one: _worth(one, noise_scale))


def _worth(corner: Corner, noise_scale: float) -> float:
    """Goodput up to a factor; of a step that takes no time: infinite."""
    worth = corner.samples * efficiency(corner.samples, base_batch=1, noise_scale=noise_scale)
    return worth / corner.seconds if corner.seconds > 0 else math.inf


def _turning(alpha: Seconds, beta: Seconds, noise_scale: float) -> float:
    """Where αφ = βB², if anywhere."""
    inside = alpha > 0 and beta > 0 and not math.isinf(noise_scale)
    return math.sqrt(alpha * noise_scale / beta) if inside else math.inf
