"""Where templates come from: sources, of which the plain enumeration is the floor that no other can lower.

The enumeration makes "one pipeline with widths, replicated": each pool of devices in one run of alike stages,
the runs in any order; for every number of copies and every micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .batch import Templates
from .columns import Completion
from .score import values_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_COMBINATIONS = 8_000
"""Combinations of runs ranked at once for a number of copies and a micro-batch: some 0.5 ms of one core."""

MOST_TEMPLATES = 2400
"""Templates of a whole enumeration: completed in some 0.1 s of one core at 128 devices."""

FIRST_BATCHES = (60, 600)
"""Templates of its first batch, and of the first two."""

KEPT_EACH = 24
"""Of these, how many are kept at most, so that no number of copies or micro-batch crowds out the others."""

GRANULARITY = 0.35
"""A stage time exceeds the even one by so many blocks, on average over random pipelines."""


class Source(Protocol):
    """Anything that proposes templates; what it proposes is completed exactly, so it may err."""

    name: str

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """Templates in batches, the likeliest and smallest batch first; the same for the same seed."""
        ...


@dataclass(frozen=True, slots=True)
class _Runs:
    """Ways to use one pool in each of some copies: runs of alike stages; the first way is not at all."""

    tp: Ints
    width: Ints
    tile: Ints
    depth: Ints
    speed: Floats
    """Micro-batches a second of the whole model if blocks were sand."""
    room: Floats
    """Part of the whole model that fits into the run."""
    price: Floats
    """Of its devices for an hour."""


class Enumeration:
    """One template with widths, replicated."""

    name = "enumeration"

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """The best few by the closed form, then the others; without chance."""
        found = self.templates(completion, MOST_TEMPLATES)
        for start, stop in pairwise((0, *FIRST_BATCHES, len(found))):
            if start < min(stop, len(found)):
                yield found.take(np.arange(start, min(stop, len(found))))

    def templates(self, completion: Completion, most: int) -> Templates:
        """The best by a closed form that deals blocks like sand, over all copies and micro-batches."""
        found: list[tuple[Floats, Ints]] = []
        for copies in _copy_counts(completion):
            for size in _sizes(completion, copies):
                found.append(_ranked(completion, copies, size))
        seconds = np.concatenate([s for s, _ in found] or [np.empty(0)])
        if not len(seconds):
            return Templates.of([])
        rows = np.concatenate([r for _, r in found])
        kept = rows[np.argsort(seconds, kind="stable")]
        orders = _orders(len(completion.supply.pools))
        kept = kept[: max(1, most // len(orders))]
        parts = Templates.joined([_templates(kept, order) for order in orders])
        best_first = np.arange(len(parts)).reshape(len(orders), -1).T.ravel()
        return parts.take(best_first).distinct()


def _orders(pools: int) -> list[tuple[int, ...]]:
    """Every order of up to three pools; of more, each rotation both ways round."""
    if pools <= 3:
        return list(permutations(range(pools)))
    there = [tuple((k + i) % pools for i in range(pools)) for k in range(pools)]
    return list(dict.fromkeys(order for row in there for order in (row, row[::-1])))


def _copy_counts(completion: Completion) -> list[int]:
    """All up to 8, then steps of a quarter of a power of two."""
    most = min(completion.supply.num_devices, completion.request.global_batch)
    steps = [base * k // 4 for base in (8 << i for i in range(20)) for k in (4, 5, 6, 7)]
    return [n for n in (*range(1, 8), *steps) if n <= most]


def _sizes(completion: Completion, copies: int) -> list[int]:
    """Micro-batches: powers of two and three times those, within what the copies can take."""
    request = completion.request
    most = min(request.global_batch // copies, request.most_micro_batch)
    return [n for n in sorted({k << i for k in (1, 3) for i in range(12)}) if n <= most]


def _ranked(completion: Completion, copies: int, size: int) -> tuple[Floats, Ints]:
    """Seconds, and ``[K, pools × 4 + 2]``: TP, width, tile, depth by pool, then copies, micro-batch."""
    pools = completion.supply.pools
    each = max(3, int(MOST_COMBINATIONS ** (1 / len(pools))))
    runs = [_runs_of(completion, p, copies, size, each) for p in range(len(pools))]
    speed = _outer(np.add, [r.speed for r in runs])
    depth = _outer(np.add, [r.depth for r in runs])
    room = _outer(np.add, [r.room for r in runs])
    length = completion.rows.num_blocks
    good = (speed > 0) & (depth <= length) & (room >= 1)
    if not good.any():
        return np.empty(0), np.empty((0, 4 * len(pools) + 2), np.int64)
    with np.errstate(divide="ignore"):
        pace = np.where(good, (1 + GRANULARITY * depth / length) / speed, np.inf)
    count = -(-completion.request.global_batch // (copies * size))
    seconds = np.maximum(1, count - 1 + depth) * pace + _sync(completion, runs, speed, copies, good)
    hourly = copies * _outer(np.add, [r.price for r in runs])
    flat = values_of(seconds, hourly, completion.request).ravel()
    best = np.argpartition(flat, min(KEPT_EACH, len(flat) - 1))[:KEPT_EACH]
    best = best[np.isfinite(flat[best])]
    index = np.unravel_index(best, seconds.shape)
    parts = [
        np.stack([r.tp[i], r.width[i], r.tile[i], r.depth[i]], axis=1)
        for r, i in zip(runs, index, strict=True)
    ]
    tail = np.broadcast_to(np.array([copies, size]), (len(best), 2))
    return flat[best], np.concatenate([*parts, tail], axis=1)


def _sync(
    completion: Completion, runs: Sequence[_Runs], speed: Floats, copies: int, good: NDArray[np.bool_]
) -> Floats:
    """The reduction of the heaviest stage, its NIC to itself."""
    request = completion.request
    gradients = (
        request.tables.parameters(0, completion.rows.num_blocks) * request.model.bytes_per_parameter.gradient
    )
    rows = []
    for p, r in enumerate(runs):
        members = np.maximum(1, copies * r.width)
        inside = members * r.tp <= completion.supply.pools[p].node_size
        each = completion.network.rings(np.full_like(members, p), members, inside, r.tp)
        part = np.where(r.depth > 0, r.speed / np.maximum(1, r.depth), 0.0)
        rows.append(np.where(r.depth > 0, each * gradients * part / r.tp, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(good, _outer(np.maximum, rows) / speed, np.inf)


def _runs_of(completion: Completion, pool: int, copies: int, size: int, most: int) -> _Runs:
    """Not at all, and the ``most - 1`` fastest, of every TP degree some."""
    ways = list(_ways(completion, pool, copies, size))
    tp, width, tile, depth = (np.array([1, *(way[i] for way in ways)], np.int64) for i in range(4))
    depth[0] = width[0] = 0
    share = -(-size // np.maximum(width, 1))
    row = completion.rows.of(np.full_like(tp, pool), tp, share, width, tile)
    whole, room = _whole(completion, row)
    speed = np.where(row >= 0, depth / whole, 0.0)
    room = np.where(row >= 0, depth * room, 0.0)
    good = np.nonzero((speed > 0) & (room > 0))[0]
    by_speed = good[np.argsort(-speed[good], kind="stable")]
    some = [by_speed[tp[by_speed] == t][:2] for t in np.unique(tp[by_speed])]
    kept = list(dict.fromkeys([*(int(i) for part in some for i in part), *(int(i) for i in by_speed)]))
    index = np.array([0, *kept[: most - 1]], np.int64)
    price = np.asarray(completion.supply.pools[pool].price_per_hour * tp * width * depth, float)
    return _Runs(tp[index], width[index], tile[index], depth[index], speed[index], room[index], price[index])


def _ways(completion: Completion, pool: int, copies: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(TP degree, width, tile, depth): every share once, at its least width, as deep as devices go."""
    supply = completion.supply.pools[pool]
    for tp in supply.degrees:
        places = supply.groups(tp) // copies
        widths = dict.fromkeys(-(-size // -(-size // w)) for w in range(1, min(places, size) + 1))
        for width in widths:
            deepest = min(places // width, completion.rows.num_blocks)
            for depth in dict.fromkeys((deepest, deepest // 2, deepest // 4)):
                if depth:
                    for tile in _tiles(completion, pool, tp * width):
                        yield tp, width, tile, depth


def _tiles(completion: Completion, pool: int, devices: int) -> list[int]:
    """Devices that hold the experts once: one, those of a node, twice and four times those, or all."""
    experts = max(block.experts for block in completion.request.model.blocks)
    if not experts:
        return [1]
    node = completion.supply.pools[pool].node_size
    wanted = (1, 2, node, 2 * node, 4 * node, devices)
    return [t for t in dict.fromkeys(wanted) if t <= min(devices, 4 * experts) and devices % t == 0]


def _whole(completion: Completion, row: Ints) -> tuple[Floats, Floats]:
    """Seconds of the whole model on each row, and the part of it that one stage there holds at the most."""
    forward, backward = completion.rows.seconds
    at = np.maximum(row, 0)
    whole = forward[at, -1] + backward[at, -1]
    return whole, completion.rows.whole_fits(row)


def _templates(rows: Ints, order: Sequence[int]) -> Templates:
    """Runs in an order of the pools, as stages."""
    runs = np.stack([rows[:, 4 * p : 4 * p + 4] for p in order], axis=1)
    ends = np.cumsum(runs[:, :, 3], axis=1)
    stage = np.arange(int(ends[:, -1].max(initial=1)))
    run = np.minimum((ends[:, None, :] <= stage[:, None]).sum(axis=2), len(order) - 1)
    there = stage < ends[:, -1:]
    pool = np.asarray(order, np.int64)[run]
    tp, width, tile = (np.take_along_axis(runs[:, :, i], run, axis=1) for i in range(3))
    return Templates(
        np.where(there, pool, 0),
        np.where(there, tp, 1),
        np.where(there, width, 0),
        np.where(there, tile, 1),
        rows[:, -2].copy(),
        rows[:, -1].copy(),
    )


def _outer(combine: np.ufunc, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """``combine`` over every choice of one element of each row."""
    found = rows[0]
    for row in rows[1:]:
        found = combine.outer(found, row)
    return found
