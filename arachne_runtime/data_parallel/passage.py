"""When the parts of one backward began and ended on this rank, as numbers that travel with the next sum."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..batch import Reading
from .clock import Clock, Mark


@dataclass(slots=True)
class Passage:
    """One backward that ends in a sum."""

    samples: int
    before: Mark
    """When the sum before it had ended: load, forward and update lie between."""
    started: Mark
    ready: list[Mark | None]
    """By bucket; None: some parameter of it got no gradient."""
    sent: list[Mark] = field(default_factory=list)
    arrived: list[Mark] = field(default_factory=list)
    ended: Mark | None = None

    def numbers(self, clock: Clock) -> list[float] | None:
        """Samples, seconds outside and within the backward, by bucket: part at which it was ready, seconds.

        None: not all of it is over, or it took no time that the clock can tell.
        """
        outside, backward = clock.between(self.before, self.started), clock.between(self.started, self.ended)
        if not outside or not backward or outside <= 0 or backward <= 0:
            return None
        until = [backward if mark is None else clock.between(self.started, mark) for mark in self.ready]
        seconds = [self._reduce_s(clock, k) for k in range(len(self.sent))]
        parts = [None if at is None else min(max(at / backward, 0.0), 1.0) for at in until]
        found = [float(self.samples), outside, backward, *parts, *seconds]
        return [x for x in found if x is not None] if None not in found else None

    def _reduce_s(self, clock: Clock, k: int) -> float | None:
        """What bucket ``k`` added: since it was sent, or since the one before it had arrived."""
        alone = clock.between(self.sent[k], self.arrived[k])
        behind = clock.between(self.arrived[k - 1], self.arrived[k]) if k else alone
        return None if alone is None or behind is None else max(min(alone, behind), 0.0)


def num_numbers(num_buckets: int) -> int:
    """How many numbers a passage becomes."""
    return 3 + 2 * num_buckets


def reading_of(numbers: Sequence[float], num_buckets: int) -> Reading:
    """What a rank told."""
    samples, outside, backward, *rest = numbers
    return Reading(
        samples=round(samples),
        outside_s=outside,
        backward_s=backward,
        ready=tuple(rest[:num_buckets]),
        reduce_s=tuple(rest[num_buckets : 2 * num_buckets]),
    )
