"""Which samples of a step each rank takes: runs of the one global order, cut by shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..plan.shares import largest_remainder
from .link import Sharing


@dataclass(frozen=True, slots=True)
class Portion:
    """One batch of one rank."""

    places: range
    """In the order of the epoch; never empty."""
    rows: int
    """Samples that are this rank's own: all of them, or 0 where it holds another's to join."""


@dataclass(frozen=True, slots=True)
class Step:
    """A global batch, in one round or, where it does not fit into memory at once, several."""

    number: int
    """Counted over the life of the loader."""
    epoch: int
    start: int
    """Place of its first sample in the order of the epoch."""
    batch: int
    """Samples that it would have if it were not the last of an epoch."""
    rounds: tuple[tuple[int, ...], ...]
    """Shares, by round and rank."""

    @property
    def num_rows(self) -> int:
        """Samples of all ranks and rounds."""
        return sum(map(sum, self.rounds))

    @property
    def stop(self) -> int:
        """Place behind its last sample."""
        return self.start + self.num_rows

    def portions(self, rank: int) -> list[Portion]:
        """The batches of a rank, by round."""
        starts = accumulate(map(sum, self.rounds), initial=self.start)
        return [_portion(start, shares, rank) for start, shares in zip(starts, self.rounds, strict=False)]


def _portion(start: int, shares: Sequence[int], rank: int) -> Portion:
    mine = shares[rank]
    first = start + sum(shares[:rank])
    return Portion(range(first, first + mine), mine) if mine else Portion(range(start, start + 1), 0)


def rounds_of(num_rows: int, sharing: Sharing) -> tuple[tuple[int, ...], ...]:
    """Shares of a step: in one round, or in the fewest that stay within what every rank takes at once."""
    caps = sharing.caps
    known = [cap for cap in caps if cap is not None]
    at_once = sum(known) if known and len(known) == len(caps) else num_rows
    num_rounds = -(-num_rows // max(at_once, 1))
    sizes = largest_remainder(num_rows, [1] * num_rounds)
    return tuple(sharing.shares(size) for size in sizes)
