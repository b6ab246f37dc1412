"""Every way to deal devices, counted by pool, to stages and to pipelines."""

from collections.abc import Iterator
from itertools import product

Counts = tuple[int, ...]
"""Devices by pool (node or device type), in a fixed order of the pools."""


def vectors_below(pool: Counts) -> Iterator[Counts]:
    """Every non-zero vector of counts that fits into ``pool``, largest first."""
    for vector in product(*(range(count, -1, -1) for count in pool)):
        if any(vector):
            yield vector


def compositions(pool: Counts, max_depth: int) -> Iterator[tuple[Counts, ...]]:
    """Every ordered way to deal *all* devices of ``pool`` to at most ``max_depth`` stages."""
    if not any(pool):
        yield ()
    elif max_depth:
        for first in vectors_below(pool):
            rest = tuple(a - b for a, b in zip(pool, first, strict=True))
            for tail in compositions(rest, max_depth - 1):
                yield (first, *tail)


def packings(pool: Counts, at_most: Counts | None = None) -> Iterator[tuple[Counts, ...]]:
    """Every unordered way to deal devices to pipelines, one vector each; some devices may stay idle."""
    for first in vectors_below(pool):
        if at_most is None or first <= at_most:
            rest = tuple(a - b for a, b in zip(pool, first, strict=True))
            yield (first,)
            for tail in packings(rest, first):
                yield (first, *tail)
