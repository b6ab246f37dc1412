"""The plans that anyone would try first: one TP degree and equal stages, on one pool or on all of them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .batch import Templates
from .columns import Completion, largest_shares
from .shapes import Shapes, StageShape, expanded

MOST_TEMPLATES = 120
"""Templates of the one batch: completed in some 10 ms of one core."""


class Uniform:
    """One TP degree for all stages, all of them one replica wide, at depths and copies of powers of two."""

    name = "uniform"

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """One small batch; without chance."""
        shapes = Shapes.of(list(dict.fromkeys(_shapes(completion))))
        templates, _ = expanded(completion, shapes)
        best = np.argsort(_seconds_of_sand(completion, templates), kind="stable")
        yield templates.take(best[:MOST_TEMPLATES])


def _seconds_of_sand(completion: Completion, templates: Templates) -> NDArray[np.float64]:
    """``[K]``: seconds of the pipeline if blocks were sand and nothing else took time."""
    t, count = templates, completion.counts(templates)
    row = completion.rows.of(t.pool, t.tp, largest_shares(t), t.width, t.tile)
    speed = np.where(row >= 0, 1 / completion.rows.whole_s(row), 0.0).sum(axis=1)
    with np.errstate(divide="ignore"):
        found: NDArray[np.float64] = (count - 1 + t.depth) / speed
    return found


def _shapes(completion: Completion) -> Iterator[tuple[StageShape, ...]]:
    """Each pool alone, at each depth; and all pools in a line, for each number of copies."""
    supply, length = completion.supply, completion.rows.num_blocks
    for tp in supply.degrees:
        groups = [pool.groups(tp) if tp in pool.degrees else 0 for pool in supply.pools]
        for p, number in enumerate(groups):
            for i in range(min(number, length).bit_length()):
                yield ((p, tp, 1),) * (1 << i)
        for i in range(sum(groups).bit_length()):
            depths = [number >> i for number in groups]
            if 0 < sum(depths) <= length:
                yield tuple((p, tp, 1) for p, depth in enumerate(depths) for _ in range(depth))
