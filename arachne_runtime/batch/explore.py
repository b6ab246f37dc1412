"""Splits that are tried because a line is badly determined: shares moved in pairs, their sum stays."""

from collections.abc import Sequence


def nudged(
    shares: Sequence[int],
    doubtful: Sequence[int],
    minima: Sequence[int],
    caps: Sequence[int],
    *,
    turn: int,
    size: float,
) -> tuple[int, ...]:
    """``shares`` with those of ``doubtful`` moved up and down by turns, within bounds; others give way.

    ``turn`` is the number of the try: odd ones move the other way. No share moves by more than a fraction
    ``size`` of it, or by one sample.
    """
    found = list(shares)
    steps = [max(1, round(size * share)) for share in shares]
    low = [max(least, share - step) for least, share, step in zip(minima, shares, steps, strict=True)]
    high = [min(most, share + step) for most, share, step in zip(caps, shares, steps, strict=True)]

    def pass_on(source: int, to: int) -> None:
        part = max(0, min(found[source] - low[source], high[to] - found[to]))
        found[source], found[to] = found[source] - part, found[to] + part

    rising, falling = doubtful[turn % 2 :: 2], doubtful[1 - turn % 2 :: 2]
    others = sorted(set(range(len(shares))) - set(doubtful), key=lambda i: (-shares[i], i))
    for i in rising:
        for source in (*falling, *others):
            pass_on(source, i)
    for i in falling:
        for to in (*others, *rising):
            pass_on(i, to)
    return tuple(found)
