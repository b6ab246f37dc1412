"""Shapes: templates without any number that can be computed, and how they get their numbers.

A shape says pool, TP degree and width of each stage. What a policy proposes is a shape; ``expanded`` gives it
every promising number of copies, micro-batch and tiling of experts, and the exact completion does the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..request import Request
from .batch import Templates, firsts
from .columns import Completion
from .supply import use_of

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LADDER: Ints = np.array(sorted({k << i for k in (1, 3) for i in range(12)}), np.int64)
"""Micro-batches worth a try, in parts of the least one: powers of two, and three times those."""


StageShape = tuple[int, int, int]
"""Pool, TP degree and width of one stage."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """K structural templates of up to S stages; stages that are not there have width 0, behind the others."""

    pool: Ints
    """``[K, S]``"""
    tp: Ints
    """``[K, S]``"""
    width: Ints
    """``[K, S]``"""

    @classmethod
    def of(cls, rows: Sequence[Sequence[StageShape]]) -> "Shapes":
        """From (pool, TP degree, width) of each stage of each."""
        table = np.zeros((len(rows), max(map(len, rows), default=1), 3), np.int64)
        table[:, :, 1] = 1
        for k, stages in enumerate(rows):
            table[k, : len(stages)] = np.reshape(stages, (len(stages), 3))
        return cls(table[:, :, 0], table[:, :, 1], table[:, :, 2])

    @classmethod
    def joined(cls, parts: Sequence["Shapes"]) -> "Shapes":
        """All of them, one behind the other."""
        size = max(part.pool.shape[1] for part in parts)
        padded = [part.sized(size) for part in parts]
        return cls(*(np.concatenate([getattr(part, f.name) for part in padded]) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.pool)

    @property
    def depth(self) -> Ints:
        """``[K]``: stages of each."""
        found: Ints = (self.width > 0).sum(axis=1)
        return found

    def take(self, index: Ints | Bools) -> "Shapes":
        """Some of them, in that order."""
        return Shapes(self.pool[index], self.tp[index], self.width[index])

    def stages(self, k: int) -> tuple[StageShape, ...]:
        """The stages of one as plain numbers."""
        depth = int((self.width[k] > 0).sum())
        return tuple(zip(*(a[k, :depth].tolist() for a in (self.pool, self.tp, self.width)), strict=True))

    def sized(self, size: int) -> "Shapes":
        """With room for at least so many stages."""
        more = ((0, 0), (0, max(0, size - self.pool.shape[1])))
        return Shapes(
            np.pad(self.pool, more), np.pad(self.tp, more, constant_values=1), np.pad(self.width, more)
        )

    def distinct(self) -> "Shapes":
        """Each once, the first of equals, order kept."""
        there = self.width > 0
        rows = np.concatenate([np.where(there, a, 0) for a in (self.pool, self.tp, self.width)], axis=1)
        return self.take(firsts(rows))

    def primitive(self) -> "Shapes":
        """Widths divided by their greatest common divisor: the same proportions in the smallest pipeline."""
        divisor = np.gcd.reduce(self.width, axis=1)
        return Shapes(self.pool, self.tp, self.width // np.maximum(divisor, 1)[:, None])


def shapes_of(templates: Templates) -> Shapes:
    """The primitive shape of each; several may be equal."""
    return Shapes(templates.pool, templates.tp, templates.width).primitive()


def expanded(completion: Completion, shapes: Shapes) -> tuple[Templates, Ints]:
    """Every promising (copies, micro-batch, tiling of experts) of each shape; ``[N]``: the shape of each.

    Copies: the most that the supply holds, and the fewest that need as many micro-batches each. Where experts
    or ZeRO gain from width, copies merged into wider stages. Micro-batches: ``LADDER`` times the widest.
    """
    request = completion.request
    most = _most_copies(completion, shapes)
    parts: list[tuple[Templates, Ints]] = []
    for merged in _merges(request, most):
        own = np.nonzero(most > 0)[0]
        wide = Shapes(shapes.pool[own], shapes.tp[own], shapes.width[own] * merged[own, None])
        for copies in _copies(request, most[own] // merged[own]):
            parts += [(t, own[i]) for t, i in _numbered(request, wide, copies)]
    templates, origin = Templates.joined([t for t, _ in parts]), np.concatenate([i for _, i in parts])
    order = np.argsort(origin, kind="stable")
    return _distinct(templates.take(order), origin[order])


def possible(completion: Completion, templates: Templates) -> Templates:
    """Those that the devices hold and the global batch fills, order kept."""
    t, limits, request = templates, completion.supply.limits, completion.request
    use = use_of(limits, t.pool, t.tp, t.width) * t.copies[:, None]
    good = (use <= np.array([limit.places for limit in limits])).all(axis=1)
    good &= (t.depth >= 1) & (t.depth <= completion.rows.num_blocks) & (t.copies >= 1)
    good &= (t.micro_batch <= request.most_micro_batch) & (t.copies * t.micro_batch <= request.global_batch)
    good &= t.width.max(axis=1, initial=0) <= t.micro_batch
    return t.take(good)


def _most_copies(completion: Completion, shapes: Shapes) -> Ints:
    """``[K]``: copies that the nodes hold and the global batch fills; 0 where they do not hold one."""
    limits = completion.supply.limits
    use = use_of(limits, shapes.pool, shapes.tp, shapes.width)
    places = np.array([limit.places for limit in limits])
    most = np.where(use > 0, places // np.maximum(use, 1), places.max()).min(axis=1)
    widest = shapes.width.max(axis=1, initial=0)
    most = np.minimum(most, completion.request.global_batch // np.maximum(widest, 1))
    fits = (widest > 0) & (widest <= completion.request.most_micro_batch)
    return np.where(fits & (shapes.depth <= completion.rows.num_blocks), most, 0)


def _merges(request: Request, most: Ints) -> list[Ints]:
    """How many copies become one of wider stages: one; all, half and so on where width is worth anything."""
    if not _has_experts(request) and not request.max_zero:
        return [np.ones_like(most)]
    return _halves(most)


def _copies(request: Request, most: Ints) -> list[Ints]:
    """The most there are; where money counts also half of them, a quarter and so on."""
    return _halves(most) if request.counts_money else [most]


def _halves(most: Ints) -> list[Ints]:
    """All, half, a quarter and so on down to one."""
    return [np.maximum(1, most >> i) for i in range(int(most.max(initial=1)).bit_length())]


def _numbered(request: Request, shapes: Shapes, most: Ints) -> Iterator[tuple[Templates, Ints]]:
    """Templates of so many copies of each shape, and the index of their shape."""
    size = shapes.width.max(axis=1, initial=0)[:, None] * LADDER
    room = np.minimum(request.global_batch // most, request.most_micro_batch)
    index, step = np.nonzero(size <= room[:, None])
    size, most = size[index, step], most[index]
    count = -(-request.global_batch // (most * size))
    fewest = -(-request.global_batch // (size * count))
    for copies, chosen in ((most, np.arange(len(index))), (fewest, np.nonzero(fewest < most)[0])):
        own = shapes.take(index[chosen])
        for tile in _tilings(request, own):
            t = Templates(own.pool, own.tp, own.width, tile, copies[chosen], size[chosen])
            yield t, index[chosen]


def _tilings(request: Request, shapes: Shapes) -> list[Ints]:
    """``[K, S]`` each: every device of a stage with its part of the experts, or each device with all."""
    one = np.ones_like(shapes.width)
    if not _has_experts(request):
        return [one]
    devices = np.maximum(1, shapes.tp * shapes.width)
    largest = 4 * max(block.experts for block in request.model.blocks)
    known, inverse = np.unique(devices, return_inverse=True)
    spread = [max(d for d in range(1, min(n, largest) + 1) if n % d == 0) for n in known.tolist()]
    return [np.array(spread, np.int64)[inverse.ravel()].reshape(devices.shape), one]


def _has_experts(request: Request) -> bool:
    return any(block.experts for block in request.model.blocks)


def _distinct(templates: Templates, origin: Ints) -> tuple[Templates, Ints]:
    """Each template of a shape once."""
    t = templates
    rows = np.concatenate(
        [t.width, t.tile, t.copies[:, None], t.micro_batch[:, None], origin[:, None]], axis=1
    )
    kept = firsts(rows)
    return templates.take(kept), origin[kept]
