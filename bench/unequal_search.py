"""The best split of a batch by direct measured search: samples moved between two ranks while that wins."""

from collections.abc import Callable, Iterator, Sequence

from .unequal_records import Shares

WIN = 0.995
"""Time of a split over that of the best one so far, below which it takes its place."""
PARTS = (16, 64)
"""The batch is moved about by these parts of it, then by single samples."""
PATIENCE = 10
"""Lost races in a row after which smaller moves are tried."""

Race = Callable[[Shares, Shares], float]
"""Time of the first split over that of the second."""
Busy = Callable[[Shares], Sequence[float]]
"""Seconds that each rank computes in a step with this split, which was raced: who is busiest gives first."""


def climb(start: Shares, race: Race, busy: Busy, trials: int) -> Shares:
    """Race splits against the best so far, ``trials`` at most; what wins wins twice."""
    best, tried = start, {start}
    for size in sorted({max(1, sum(start) // part) for part in PARTS} | {1}, reverse=True):
        lost = 0
        while lost < PATIENCE and trials > 0:
            candidate = next((one for one in moves(best, busy(best), size) if one not in tried), None)
            if candidate is None:
                break
            trials -= 1
            tried.add(candidate)
            if race(candidate, best) < 1 and race(candidate, best) < WIN:
                best, lost = candidate, 0
            else:
                lost += 1
    return best


def moves(split: Shares, busy: Sequence[float], size: int) -> Iterator[Shares]:
    """Splits near this one, each of which leaves every rank a sample.

    First the k busiest give ``size`` samples each to who would be idlest with them, for all k: one alone
    gains nothing where two are equally late. Then any rank to any other.
    """
    ranks = range(len(split))
    givers = [i for i in sorted(ranks, key=lambda i: (-busy[i], i)) if split[i] > size]
    for count in range(1, len(split)):
        yield _levelled(split, busy, size, givers[:count])
    for i in givers:
        for j in sorted(ranks, key=lambda j: (busy[j], j)):
            if i != j:
                yield _levelled(split, busy, size, [i], [j])


def _levelled(
    split: Shares, busy: Sequence[float], size: int, givers: Sequence[int], takers: Sequence[int] = ()
) -> Shares:
    """Each of ``givers`` gives to whom of ``takers`` (all others) is the idlest with it, as far as known."""
    found = list(split)
    takers = takers or [j for j in range(len(split)) if j not in givers]

    def busy_with(j: int) -> float:
        return busy[j] / split[j] * (found[j] + size)

    for i in givers:
        found[i] -= size
        if takers:
            found[min(takers, key=busy_with)] += size
        else:
            found[i] += size
    return tuple(found)
