"""Where templates come from: sources, of which the plain enumeration is the floor that no other can lower.

The enumeration makes "one pipeline with widths, replicated": each pool of devices in one run of alike stages,
the runs in any order; for every number of copies and every micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import permutations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .batch import Templates
from .columns import Completion
from .score import values_of
from .shapes import LADDER

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_COMBINATIONS = 8_000
"""Combinations of runs ranked at once for a number of copies and a micro-batch: some 0.2 ms of one core."""

MOST_TEMPLATES = 2400
"""Templates of a whole enumeration: completed in some 0.1 s of one core at 128 devices."""

FIRST_BATCH, NEXT_BATCH = 60, 600
"""Templates of its batches."""

KEPT_EACH = 24
"""Of these, how many are kept at most, so that no number of copies or micro-batch crowds out the others."""

GRANULARITY = 0.35
"""A stage time exceeds the even one by so many blocks, on average over random pipelines."""


class Source(Protocol):
    """Anything that proposes templates; what it proposes is completed exactly, so it may err."""

    @property
    def name(self) -> str:
        """Its word in reports, lower case."""
        ...

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """Templates in batches, the likeliest and smallest batch first; the same for the same seed."""
        ...


class Enumeration:
    """One template with widths, replicated."""

    name = "enumeration"

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """A few from powers of two of copies and micro-batches first, then of all; without chance."""
        pairs = _pairs(completion)
        few = [pair for pair in pairs if all(n & (n - 1) == 0 for n in pair)]
        first = self._best(completion, few, FIRST_BATCH)
        if len(first):
            yield first
        whole = self._best(completion, pairs, MOST_TEMPLATES)
        both = Templates.joined([first, whole]).distinct()
        for start in range(len(first), len(both), NEXT_BATCH):
            yield both.take(np.arange(start, min(start + NEXT_BATCH, len(both))))

    def templates(self, completion: Completion, most: int) -> Templates:
        """The best by a closed form that deals blocks like sand, over all copies and micro-batches."""
        return self._best(completion, _pairs(completion), most)

    def _best(self, completion: Completion, pairs: Sequence[tuple[int, int]], most: int) -> Templates:
        """At most so many with these copies and micro-batches, in every order of pools, best first."""
        pools = range(len(completion.supply.pools))
        if not pools:
            return Templates.of([])
        each = max(3, int(MOST_COMBINATIONS ** (1 / len(pools))))
        runs = [_Runs.of(completion, p, pairs, each) for p in pools]
        found = [_ranked(completion, [r.take(i) for r in runs], *pair) for i, pair in enumerate(pairs)]
        seconds = np.concatenate([s for s, _ in found] or [np.empty(0)])
        if not len(seconds):
            return Templates.of([])
        orders = _orders(len(pools))
        kept = np.argsort(seconds, kind="stable")[: max(1, most // len(orders))]
        rows = np.concatenate([r for _, r in found])[kept]
        parts = Templates.joined([_templates(rows, order) for order in orders])
        best_first = np.arange(len(parts)).reshape(len(orders), -1).T.ravel()
        return parts.take(best_first).distinct()


def _pairs(completion: Completion) -> list[tuple[int, int]]:
    """Copies with micro-batches."""
    return [(copies, size) for copies in _copy_counts(completion) for size in _sizes(completion, copies)]


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
    return [n for n in LADDER.tolist() if n <= most]


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
    sync: Floats
    """Seconds of the reduction of one of its stages, its NIC to itself, for each micro-batch a second that
    the whole pipeline makes less."""
    hop_s: Floats
    """A micro-batch's way from one of its stages to another node, or back."""
    starts: Ints
    """Of each pair of copies and micro-batch, its first way; and the end."""

    @classmethod
    def of(cls, completion: Completion, pool: int, pairs: Sequence[tuple[int, int]], most: int) -> "_Runs":
        """For each pair not at all, and the ``most - 1`` fastest ways, of every TP degree some."""
        ways = [_ways(completion, pool, *pair) for pair in pairs]
        pair = np.repeat(np.arange(len(pairs)), [len(w) for w in ways])
        tp, width, tile, depth = np.concatenate([np.reshape(w, (-1, 4)) for w in ways]).T
        copies, size = (np.array([p[i] for p in pairs], np.int64)[pair] for i in (0, 1))
        share = -(-size // np.maximum(width, 1))
        row = completion.rows.of(np.full_like(tp, pool), tp, share, width, tile)
        speed = np.where(row >= 0, depth / completion.rows.whole_s(row), 0.0)
        room = np.where(row >= 0, depth * completion.rows.whole_fits(row), 0.0)
        kept = _fastest(pair, tp, np.where(room > 0, speed, 0.0), depth == 0, most)
        price = np.asarray(completion.supply.pools[pool].price_per_hour * tp * width * depth, float)
        sync = _sync(completion, pool, copies, tp, width, depth, speed)
        hop = _hops(completion, pool, copies, tp, width, depth, share)
        starts = np.searchsorted(pair[kept], np.arange(len(pairs) + 1))
        return cls(tp, width, tile, depth, speed, room, price, sync, hop, starts)._take(kept)

    def take(self, pair: int) -> "_Runs":
        """The ways of one pair."""
        return self._take(slice(self.starts[pair], self.starts[pair + 1]))

    def _take(self, index: Ints | slice) -> "_Runs":
        parts = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "starts"}
        return replace(self, **parts)


def _fastest(pair: Ints, tp: Ints, speed: Floats, none: Bools, most: int) -> Ints:
    """Of each pair the way that uses nothing, then up to ``most - 1`` others: two of each TP degree first."""
    by_degree = np.lexsort((-speed, tp, pair))
    group = pair * (tp.max(initial=0) + 1) + tp
    place = _place_in_group(group[by_degree])
    second = np.empty_like(place)
    second[by_degree] = place
    order = np.lexsort((-speed, second >= 2, ~none, pair))
    order = order[none[order] | (speed[order] > 0)]
    return order[_place_in_group(pair[order]) < most]


def _place_in_group(group: Ints) -> Ints:
    """Of each element, how many before it are of its group; groups are together."""
    start = np.searchsorted(group, group, side="left") if len(group) else group
    return np.arange(len(group)) - start


def _ranked(completion: Completion, runs: Sequence[_Runs], copies: int, size: int) -> tuple[Floats, Ints]:
    """Seconds, and ``[K, pools × 4 + 2]``: TP, width, tile, depth by pool, then copies, micro-batch."""
    speed = _outer(np.add, [r.speed for r in runs])
    depth = _outer(np.add, [r.depth for r in runs])
    length = completion.rows.num_blocks
    good = (speed > 0) & (depth <= length) & (_outer(np.add, [r.room for r in runs]) >= 1)
    if not good.any():
        return np.empty(0), np.empty((0, 4 * len(runs) + 2), np.int64)
    count = -(-completion.request.global_batch // (copies * size))
    steps = np.maximum(1, count - 1 + depth)
    work = steps * (1 + GRANULARITY * depth / length)
    hops = np.where(depth > 1, (steps + depth) * _outer(np.maximum, [r.hop_s for r in runs]), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = (work + _outer(np.maximum, [r.sync for r in runs])) / speed + hops
    seconds = np.where(good, seconds, np.inf)
    free = np.zeros_like(seconds)  # unless money counts no price is looked at
    hourly = copies * _outer(np.add, [r.price for r in runs]) if completion.request.counts_money else free
    flat = values_of(seconds.ravel(), hourly.ravel(), completion.request)
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
    completion: Completion, pool: int, copies: Ints, tp: Ints, width: Ints, depth: Ints, speed: Floats
) -> Floats:
    """Of one stage, its NIC to itself; its part of the blocks is its part of the speed."""
    request = completion.request
    gradients = (
        request.tables.parameters(0, completion.rows.num_blocks) * request.model.bytes_per_parameter.gradient
    )
    members = np.maximum(1, copies * width)
    inside = members * tp <= completion.supply.pools[pool].node_size
    each = completion.network.rings(np.full_like(members, pool), members, inside, tp)
    found: Floats = np.where(depth > 0, each * gradients * speed / np.maximum(1, depth) / tp, 0.0)
    return found


def _hops(
    completion: Completion, pool: int, copies: Ints, tp: Ints, width: Ints, depth: Ints, share: Ints
) -> Floats:
    """Of the model's usual boundary: two neighbours wait for each other's messages once a micro-batch."""
    node = completion.supply.pools[pool].node_size
    request = completion.request
    boundary = request.tables.output_bytes[len(request.model.blocks) // 2]
    each = np.maximum(1, tp * width * depth)
    seats = np.minimum(np.maximum(1, node // tp), width * np.minimum(np.maximum(1, node // each), copies))
    at = np.full_like(tp, pool)
    fixed, per_byte = completion.network.lines(at, at, np.zeros(tp.shape, bool), seats * tp)
    return np.where(depth > 0, fixed + per_byte * boundary * share / tp, 0.0)


def _ways(completion: Completion, pool: int, copies: int, size: int) -> list[tuple[int, int, int, int]]:
    """(TP degree, width, tile, depth): not at all, and every share once, at its least width, some depths."""
    supply = completion.supply.pools[pool]
    places = tuple((tp, supply.groups(tp) // copies) for tp in supply.degrees)
    experts = max(block.experts for block in completion.request.model.blocks)
    return _ways_in(places, size, completion.rows.num_blocks, experts, supply.node_size)


@lru_cache(maxsize=4096)
def _ways_in(
    places: tuple[tuple[int, int], ...], size: int, num_blocks: int, experts: int, node_size: int
) -> list[tuple[int, int, int, int]]:
    """As ``_ways``, with so many places for groups of each TP degree."""
    found = [(1, 0, 1, 0)]
    for tp, number in places:
        for width in dict.fromkeys(-(-size // -(-size // w)) for w in range(1, min(number, size) + 1)):
            deepest = min(number // width, num_blocks)
            tiles = _tiles(experts, node_size, tp * width)
            for depth in dict.fromkeys((deepest, deepest // 2, deepest // 4)):
                found += [(tp, width, tile, depth) for tile in tiles if depth]
    return found


def _tiles(experts: int, node_size: int, devices: int) -> list[int]:
    """Devices that hold the experts once: one, those of a node, twice and four times those, or all."""
    if not experts:
        return [1]
    wanted = (1, 2, node_size, 2 * node_size, 4 * node_size, devices)
    return [t for t in dict.fromkeys(wanted) if t <= min(devices, 4 * experts) and devices % t == 0]


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
