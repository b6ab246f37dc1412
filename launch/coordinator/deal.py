"""Deals the samples of a step out to pipelines, exactly, where no planner has prices for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import combinations

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.shares import largest_remainder

FIXED_PART = 0.2
"""Of a micro-batch's time, what does not depend on its samples; a guess, it only ranks splits."""

MOST_MOVED = 64
"""Samples that one pipeline may take more, or less, for another: most micro-batches are smaller."""


@dataclass(frozen=True, slots=True)
class Taker:
    """A pipeline that takes samples, next to what it took in a plan that was in balance."""

    micro_batches: int
    """That it took."""
    depth: int
    """Rows that a micro-batch passes: so many less one are filled and drained."""
    shares: tuple[tuple[int, ...], ...]
    """Of the replicas that it still has, by stage: what each took of a micro-batch."""

    @property
    def least(self) -> int:
        """Samples of a micro-batch below which a replica would have none."""
        return max(map(len, self.shares))

    @property
    def most(self) -> int:
        """Samples of a micro-batch up to which its tightest stage takes no more a replica than it did."""
        return max(self.least, min(map(sum, self.shares)))

    def dealt(self, micro_batch: int) -> tuple[tuple[int, ...], ...]:
        """New shares, by stage: as the old ones, at least 1."""
        return tuple(_at_least_one(micro_batch, old) for old in self.shares)

    def time(self, micro_batches: int, micro_batch: int) -> float:
        """Of a step, in units of what it took."""
        longer = max(
            new / old
            for stage, olds in zip(self.dealt(micro_batch), self.shares, strict=True)
            for new, old in zip(stage, olds, strict=True)
        )
        passes = (micro_batches + self.depth - 1) / (self.micro_batches + self.depth - 1)
        return passes * (FIXED_PART + (1 - FIXED_PART) * longer)


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """What one pipeline takes of a step."""

    time: float
    """In units of what it took before."""
    micro_batches: int
    micro_batch: int

    @property
    def samples(self) -> int:
        """Of the step."""
        return self.micro_batches * self.micro_batch


def deal(total: int, takers: Sequence[Taker]) -> tuple[Split, ...]:
    """Splits of ``total`` samples, in the order of ``takers``; the slowest takes about as little as it can.

    Micro-batches as large as the replicas took before, dealt one by one to who ends first; what is left is
    fitted into one or two pipelines by other sizes, larger ones than before only where no others add up.
    Raises NoFeasiblePlanError where there are fewer samples than the pipelines need.
    """
    splits = _one_by_one(total, takers)
    left = total - sum(split.samples for split in splits)
    if left == 0:
        return tuple(splits)
    found = [*_in_one(left, takers, splits, larger=False), *_in_two(left, takers, splits)]
    found = found or [*_in_one(left, takers, splits, larger=True)]
    return min(found, key=lambda one: (max(s.time for s in one), sum(s.time for s in one), one))


def _one_by_one(total: int, takers: Sequence[Taker]) -> list[Split]:
    """One micro-batch each, then more in the order in which they end, while whole ones are left."""
    left = total - sum(taker.most for taker in takers)
    if not takers or left < 0:
        raise NoFeasiblePlanError(f"{total} samples are too few for {len(takers)} pipelines")
    splits = [_split(taker, 1, taker.most) for taker in takers]
    following = [(_split(taker, 2, taker.most), i) for i, taker in enumerate(takers)]
    heapify(following)
    while following:
        split, i = heappop(following)
        if split.micro_batch <= left:
            left -= split.micro_batch
            splits[i] = split
            heappush(following, (_split(takers[i], split.micro_batches + 1, split.micro_batch), i))
    return splits


def _in_one(
    left: int, takers: Sequence[Taker], splits: Sequence[Split], *, larger: bool
) -> Iterator[tuple[Split, ...]]:
    """Each way to have one pipeline take ``left`` samples more."""
    for i, taker in enumerate(takers):
        if (one := _best(taker, splits[i].samples + left, larger)) is not None:
            yield (*splits[:i], one, *splits[i + 1 :])


def _in_two(left: int, takers: Sequence[Taker], splits: Sequence[Split]) -> Iterator[tuple[Split, ...]]:
    """Each way to have two of them take ``left`` samples more together; alike pairs are tried once."""
    pairs: dict[tuple[Taker, Split, Taker, Split], tuple[int, int]] = {}
    for i, j in combinations(range(len(takers)), 2):
        pairs.setdefault((takers[i], splits[i], takers[j], splits[j]), (i, j))
    for i, j in pairs.values():
        for moved in range(-MOST_MOVED, MOST_MOVED + 1):
            one = _best(takers[i], splits[i].samples + moved, False)
            other = _best(takers[j], splits[j].samples + left - moved, False)
            if one is not None and other is not None:
                yield (*splits[:i], one, *splits[i + 1 : j], other, *splits[j + 1 :])


@lru_cache(maxsize=4096)
def _best(taker: Taker, samples: int, larger: bool) -> Split | None:
    """Of exactly so many samples; None where no size of a micro-batch divides them."""
    most = samples if larger else min(taker.most, samples)
    sizes = (size for size in range(taker.least, most + 1) if samples % size == 0)
    return min((_split(taker, samples // size, size) for size in sizes), default=None)


def _split(taker: Taker, micro_batches: int, micro_batch: int) -> Split:
    return Split(taker.time(micro_batches, micro_batch), micro_batches, micro_batch)


def _at_least_one(total: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``weights``; ``total`` is at least their number."""
    shares = list(largest_remainder(total, weights))
    for poor in (i for i, share in enumerate(shares) if share == 0):
        rich = max(range(len(shares)), key=lambda i: (shares[i] / weights[i] if shares[i] > 1 else 0, -i))
        shares[rich] -= 1
        shares[poor] = 1
    return tuple(shares)
