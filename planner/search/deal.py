"""How many samples each pipeline takes: exact sums, and the last pipeline ends as early as it can."""

from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite

from arachne_runtime.units import Seconds


def pack_samples(times: Sequence[Sequence[Seconds]], total: int) -> tuple[int, ...] | None:
    """Samples for each pipeline, ≥ 1 and ``total`` together, that minimise the largest ``times[p][n]``.

    ``times[p][n]`` is the time of pipeline p for n samples, ``inf`` where no micro-batches make n;
    it need not ascend, so sizes that only mix to the exact total are found too. None where nothing adds up.
    Exact: a search over the values of the tables with sets of reachable sums as bits.
    """
    levels = sorted({t for row in times for t in row[1 : total + 1] if isfinite(t)})
    at = bisect_left(levels, True, key=lambda level: _reachable(times, total, level)[-1] >> total & 1 == 1)
    if at == len(levels):
        return None
    sums = _reachable(times, total, levels[at])
    counts: list[int] = []
    left = total
    for p in range(len(times) - 1, -1, -1):
        fits = [n for n in _samples(times[p], left, levels[at]) if sums[p] >> (left - n) & 1]
        counts.append(min(fits, key=lambda n: (abs(n * (p + 1) - left), n)))
        left -= counts[-1]
    return tuple(reversed(counts))


def _samples(row: Sequence[Seconds], most: int, level: Seconds) -> list[int]:
    return [n for n in range(1, min(most, len(row) - 1) + 1) if row[n] <= level]


def _reachable(times: Sequence[Sequence[Seconds]], total: int, level: Seconds) -> list[int]:
    """Bit n of entry p: the first p pipelines can take n samples together, none later than ``level``."""
    sums, within = [1], (1 << (total + 1)) - 1
    for row in times:
        reach = 0
        for n in _samples(row, total, level):
            reach |= sums[-1] << n
        sums.append(reach & within)
    return sums
