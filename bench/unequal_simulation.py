"""Replicas that take what a time model says, give or take noise, and what a balancer loses on them."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from arachne_runtime.batch import Balancer, Reading, ReplicaTime, TimeModel
from arachne_runtime.plan.shares import Line

READY_NOISE = 0.01
"""Deviation of a ready fraction, of that of the seconds of a reading 0.05."""


@dataclass
class Cluster:
    """Plays steps: all replicas start together, buckets are reduced in turn once all have them."""

    model: TimeModel
    noise: float = 0.05
    """Relative deviation of each reading."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def step(self, shares: Sequence[int]) -> list[Reading]:
        """What each replica would read."""
        pairs = list(zip(self.model.replicas, shares, strict=True))
        outside = [self._about(one.outside.at(b)) if b else 0.0 for one, b in pairs]
        backward = [self._about(one.backward.at(b)) if b else 0.0 for one, b in pairs]
        ready = [self._about_fractions() for _ in pairs]
        issued = [[a + f * p for f in one] for a, p, one in zip(outside, backward, ready, strict=True)]
        end, seconds = 0.0, []
        for k, reduce_s in enumerate(self.model.reduce_s):
            before, end = end, max(end, *(one[k] for one in issued)) + self._about(reduce_s)
            seconds.append([end - max(one[k], before) for one in issued])
        waits = map(tuple, zip(*seconds, strict=True))
        return [
            Reading(samples=b, outside_s=a, backward_s=p, ready=f, reduce_s=r)
            for b, a, p, f, r in zip(shares, outside, backward, ready, waits, strict=True)
        ]

    def _about(self, seconds: float) -> float:
        return seconds * max(0.1, 1 + self.rng.gauss(0, self.noise))

    def _about_fractions(self) -> tuple[float, ...]:
        scale = READY_NOISE * self.noise / 0.05
        return tuple(min(1.0, max(0.0, f + self.rng.gauss(0, scale))) for f in self.model.ready)


def model_of(
    ms_a_sample: Sequence[float], *, comm_s: float = 0.0, fixed_ms: float = 3.0, num_buckets: int = 4
) -> TimeModel:
    """Three tenths of the compute outside the backward; equal buckets, evenly ready."""
    replicas = (
        ReplicaTime(
            outside=Line(fixed_ms * 0.7e-3, ms * 0.3e-3), backward=Line(fixed_ms * 0.3e-3, ms * 0.7e-3)
        )
        for ms in ms_a_sample
    )
    return TimeModel(
        replicas=tuple(replicas),
        ready=tuple((k + 1) / num_buckets for k in range(num_buckets)),
        reduce_s=(comm_s / num_buckets,) * num_buckets,
    )


def slowed(model: TimeModel, replica: int, factor: float) -> TimeModel:
    """One replica takes ``factor`` times as long for everything."""

    def times(line: Line) -> Line:
        return Line(line.intercept * factor, line.slope * factor)

    replicas, one = list(model.replicas), model.replicas[replica]
    replicas[replica] = ReplicaTime(outside=times(one.outside), backward=times(one.backward))
    return replace(model, replicas=tuple(replicas))


Shares = Callable[[int], tuple[int, ...]]


@dataclass(frozen=True)
class Lost:
    """One step: what was shared, and the time lost against the true model's best shares, as a fraction."""

    shares: tuple[int, ...]
    regret: float


def play(balancer: Balancer, cluster: Cluster, steps: int, batch: int) -> Iterator[Lost]:
    """Some steps of a balancer on a cluster."""
    n = len(cluster.model.replicas)
    best_s = cluster.model.step_s(cluster.model.best(batch, [1] * n, [batch] * n))
    for _ in range(steps):
        shares = balancer.shares(batch)
        yield Lost(shares, cluster.model.step_s(shares) / best_s - 1)
        balancer.observe(cluster.step(shares))
