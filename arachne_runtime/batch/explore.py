"""Splits that are tried because a line is badly determined: shares moved in pairs, their sum stays."""

from collections.abc import Sequence

NUDGE = 0.25
"""Fraction of a share that is moved: so far apart, some ten readings with 5 % noise tell a line."""


def nudged(
    shares: Sequence[int], doubtful: Sequence[int], minima: Sequence[int], caps: Sequence[int], *, turn: int
) -> tuple[int, ...]:
    """``shares`` with those of ``doubtful`` moved up and down by turns, within bounds; others give way.

    ``turn`` is the number of the try: odd ones move the other way.
    """
    found = list(shares)
    rising = [i for place, i in enumerate(doubtful) if (place + turn) % 2 == 0]
    falling = [i for place, i in enumerate(doubtful) if (place + turn) % 2 == 1]
    others = sorted((i for i in range(len(shares)) if i not in set(doubtful)), key=lambda i: (-shares[i], i))
    for i in rising:
        _move(found, shares, [*falling, *others], i, minima, caps)
    for i in falling:
        if found[i] == shares[i]:
            _give(found, shares, [*others, *rising], i, minima, caps)
    return tuple(found)


def _step(share: int) -> int:
    return max(1, round(NUDGE * share))


def _move(
    found: list[int], shares: Sequence[int], sources: Sequence[int], to: int, minima: Sequence[int],
    caps: Sequence[int],
) -> None:  # fmt: skip
    """Raise one share by its step, at the cost of ``sources``, each by its own step at most."""
    want = min(_step(shares[to]), caps[to] - found[to])
    for i in sources:
        if want <= 0:
            return
        part = min(want, found[i] - max(minima[i], shares[i] - _step(shares[i])))
        if part > 0:
            found[i], found[to], want = found[i] - part, found[to] + part, want - part


def _give(
    found: list[int], shares: Sequence[int], targets: Sequence[int], source: int, minima: Sequence[int],
    caps: Sequence[int],
) -> None:  # fmt: skip
    """Lower one share by its step, in favour of ``targets``, each by its own step at most."""
    want = min(_step(shares[source]), found[source] - minima[source])
    for i in targets:
        if want <= 0:
            return
        part = min(want, min(caps[i], shares[i] + _step(shares[i])) - found[i])
        if part > 0:
            found[source], found[i], want = found[source] - part, found[i] + part, want - part
