"""Every template that a tiny cluster holds."""

from collections.abc import Iterator
from itertools import islice
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ..policy import MOST_STAGES, WIDTHS
from ..search.shapes import StageShape
from ..search.supply import Supply, use_of

Ints = NDArray[np.int64]


def every_shape(supply: Supply, num_blocks: int, most: int) -> list[tuple[StageShape, ...]] | None:
    """All templates whose widths have no common divisor; None where there are more than ``most``."""
    if supply.num_devices > most.bit_length() * 2:  # a chain of n devices alone has 2^(n - 1) templates
        return None
    walk = _longer((), _Places(supply), min(num_blocks, MOST_STAGES))
    tried = list(islice(walk, 4 * most + 1))
    found = [stages for stages in tried if gcd(*(width for _, _, width in stages)) == 1]
    return found if len(tried) <= 4 * most and len(found) <= most else None


class _Places:
    """What stages take, and what there is."""

    def __init__(self, supply: Supply) -> None:
        self.all: Ints = np.array([limit.places for limit in supply.limits])
        self.takes: list[tuple[StageShape, Ints]] = [
            ((p, tp, width), self._use(supply, p, tp, width))
            for p, pool in enumerate(supply.pools)
            for tp in pool.degrees
            for width in sorted(WIDTHS)
            if width <= pool.groups(tp)
        ]

    @staticmethod
    def _use(supply: Supply, pool: int, tp: int, width: int) -> Ints:
        one = [np.array([[value]], np.int64) for value in (pool, tp, width)]
        found: Ints = use_of(supply.limits, *one)[0]
        return found


def _longer(
    stages: tuple[StageShape, ...], places: _Places, most: int, used: Ints | int = 0
) -> Iterator[tuple[StageShape, ...]]:
    """All that go on from these stages, depth first."""
    if len(stages) == most:
        return
    for stage, takes in places.takes:
        if bool((used + takes <= places.all).all()):
            longer = (*stages, stage)
            yield longer
            yield from _longer(longer, places, most, used + takes)
