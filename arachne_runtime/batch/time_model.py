"""Seconds of a data-parallel step as a function of shares: unequal compute, and buckets reduced beside it.

Replica i with b_i samples computes ``a_i`` seconds outside its backward and ``P_i`` inside, both lines in
b_i; its gradients of bucket k are complete at ``a_i + φ_k P_i``. Buckets are reduced one after the other, in
``c_k`` seconds each, once all replicas have them:

    T = max_k [ max_i (a_i + φ_k P_i) + Σ_{l≥k} c_l ]

Two buckets (the last one, and all before it as one) are the two-line model of Cannikin (arXiv 2402.05302).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import UsageError
from ..plan.shares import Line, water_fill
from ..units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTime:
    """Seconds that one replica computes in a step, as lines in its samples."""

    outside: Line
    """Load, forward and update: all that it computes outside the backward."""
    backward: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Compute of all replicas, and when and how long each bucket is reduced.

    A replica without samples is ready at once.
    """

    replicas: tuple[ReplicaTime, ...]
    ready: tuple[float, ...]
    """For each bucket the fraction of the backward at which its gradients are complete (φ_k)."""
    reduce_s: tuple[Seconds, ...]
    """For each bucket the seconds of its reduction alone, once all replicas have it (c_k)."""

    def __post_init__(self) -> None:
        if not self.replicas or not self.ready or len(self.ready) != len(self.reduce_s):
            raise UsageError(
                f"a time model needs replicas and buckets; got {len(self.replicas)} replicas, "
                f"{len(self.ready)} ready fractions, {len(self.reduce_s)} reduction times"
            )

    def lines(self, accumulation: int = 1) -> tuple[tuple[Line, ...], ...]:
        """For each replica K lines in its samples of a step, the highest of which is its time.

        With ``accumulation`` micro-batches of equal size only the last one's backward is followed by
        reductions, and replicas do not wait for each other before. The update is counted in each of them,
        as readings do not tell it from the forward.
        """
        tails = list(accumulate(reversed(self.reduce_s)))[::-1]
        return tuple(
            tuple(
                _line(one, fraction, tail, accumulation)
                for fraction, tail in zip(self.ready, tails, strict=True)
            )
            for one in self.replicas
        )

    def step_s(self, shares: Sequence[int], accumulation: int = 1) -> Seconds:
        """Seconds of a step with these samples of each replica (over all its micro-batches)."""
        if len(shares) != len(self.replicas):
            raise UsageError(f"{len(shares)} shares for {len(self.replicas)} replicas")
        busy = [
            max(line.at(share) for line in lines)
            for lines, share in zip(self.lines(accumulation), shares, strict=True)
            if share
        ]
        return max([math.fsum(self.reduce_s), *busy])

    def best(
        self, total: int, minima: Sequence[int], caps: Sequence[int], accumulation: int = 1
    ) -> tuple[int, ...]:
        """Shares of the shortest step, within bounds of a micro-batch; NoFeasiblePlanError for none."""
        least, most = ([bound * accumulation for bound in bounds] for bounds in (minima, caps))
        return water_fill(total, self.lines(accumulation), least, most)


def _line(one: ReplicaTime, fraction: float, tail: Seconds, accumulation: int) -> Line:
    """When the replica has a bucket, plus all reductions from it on."""
    n = accumulation
    backwards = (n - 1 + fraction) / n  # of its backwards, the last one only until the bucket is complete
    return Line(
        intercept=n * (one.outside.intercept + backwards * one.backward.intercept) + tail,
        slope=one.outside.slope + backwards * one.backward.slope,
    )
