"""Espresso (INFOCOM 2025): one TP degree, equal pipelines, deep and uneven; a tree finds their stages.

From the paper's abstract and what other papers say of it; neither its text nor its code was at hand. Its
allocator grows a tree over how many devices of each type take part, pruned by bounds; its placer orders types
along the pipeline by their ratio of compute to memory (the first stages of 1F1B hold the most activations)
and cuts the layers unevenly by speed and memory. Here a level of the tree is the number of stages of one
type; a branch is pruned when what is left of it cannot hold the model, and leaves are cut exactly, best bound
first, until bounds are well past the best. What differs: every number of copies of the pipeline is tried, and
both directions of the order; the aim is throughput on given devices, not money; the price judges the first of
the ranking. No expert parallelism, as published: experts are whole on a device or divided by its TP group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.shares import largest_remainder
from arachne_runtime.units import Seconds

from ..cuts import Cut
from ..request import Request
from .lines import Line, Post, cut_line, line_seconds, seated
from .shortlist import Shortlist
from .site import Site
from .strategy import DEFAULT_BUDGET_S, Clock

MOST_LEAVES = 64
"""Leaves of one tree that are kept, best bound first."""

SLACK = 1.25
"""Leaves whose bound is so many times the best cut are left: the closed form is off by about as much."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """How many stages each type takes, for one (TP, copies, micro-batch)."""

    bound_s: Seconds
    stages: tuple[int, ...]
    tp: int
    copies: int
    size: int


@dataclass(frozen=True, slots=True)
class Espresso:
    """A tree over stages of each type, cut exactly."""

    name: str = "espresso"

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its first that fit; None where none does."""
        site = Site(request)
        shortlist = Shortlist(site, Clock(budget_s))
        best_s = float("inf")
        for leaf in sorted(_leaves(site, shortlist), key=lambda leaf: leaf.bound_s):
            if leaf.bound_s > SLACK * best_s or shortlist.closed:
                break
            for kind, posts in product(site.schedules, dict.fromkeys(_orders(site, leaf))):
                best_s = min(best_s, _cut(shortlist, site, leaf, posts, kind))
        return shortlist.best()


def _leaves(site: Site, shortlist: Shortlist) -> Iterator[_Leaf]:
    """Trees for every TP degree, number of copies and micro-batch, while ranking has half its time left."""
    batch = site.request.global_batch
    for tp in site.degrees:
        room = [site.capacity(kind, tp) if tp in site.degrees_of(kind) else 0 for kind in site.types]
        sizes = sorted(
            {n for kind in site.types if tp in site.degrees_of(kind) for n in site.sizes(kind, tp)}
        )
        for copies in _copies(sum(room)):
            for size in sizes:
                if shortlist.half_closed:
                    return
                if batch % size == 0 and batch // size >= copies:
                    yield from _Tree(site, tp, copies, size, [n // copies for n in room]).leaves()


def _copies(most: int) -> list[int]:
    """Every number to 8, then eight of each doubling."""
    return [n for n in range(1, most + 1) if n % (1 << max(0, n.bit_length() - 4)) == 0]


class _Tree:
    """One level for each type, fastest first; a node says how many stages the types so far take."""

    def __init__(self, site: Site, tp: int, copies: int, size: int, room: Sequence[int]) -> None:
        self.site = site
        self.tp = tp
        self.copies = copies
        self.size = size
        self.room = room
        self.count = -(-(site.request.global_batch // size) // copies)
        pairs = zip(site.types, room, strict=True)
        self.speeds = [1 / site.whole_s(kind, tp, size) if n else 0.0 for kind, n in pairs]
        self.bytes = [site.room_bytes(kind) * tp for kind in site.types]
        parameters = site.request.tables.parameters(0, site.num_blocks)
        self.needed = parameters * site.request.model.bytes_per_parameter.total

    def leaves(self) -> list[_Leaf]:
        """The most promising of those that memory may admit, depth at most the number of blocks."""
        nodes = np.zeros((1, 0), np.int64)
        for level, most in enumerate(self.room):
            grown = np.repeat(nodes, most + 1, axis=0)
            taken = np.tile(np.arange(most + 1), len(nodes))
            nodes = self._pruned(np.column_stack([grown, taken]), level)
        nodes = nodes[nodes.sum(axis=1) > 0]
        bounds = self._bounds(nodes)
        best = np.argsort(bounds, kind="stable")[:MOST_LEAVES]
        return [
            _Leaf(float(bounds[i]), tuple(nodes[i].tolist()), self.tp, self.copies, self.size)
            for i in best
            if bounds[i] < np.inf
        ]

    def _pruned(self, nodes: NDArray[np.int64], level: int) -> NDArray[np.int64]:
        """Without what is too deep, and what cannot hold the model whatever the types behind take."""
        sizes = np.array(self.bytes[: level + 1], float)
        spare = sum(n * b for n, b in zip(self.room[level + 1 :], self.bytes[level + 1 :], strict=True))
        fits = nodes @ sizes + spare >= self.needed
        kept: NDArray[np.int64] = nodes[fits & (nodes.sum(axis=1) <= self.site.num_blocks)]
        return kept

    def _bounds(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Work divided as if blocks could be split: every stage takes the same time."""
        depth = nodes.sum(axis=1)
        pace = 1 / np.maximum(nodes @ np.array(self.speeds), 1e-300)
        slow = (nodes > 0) @ (np.array(self.speeds) == 0.0)
        bounds: NDArray[np.float64] = (self.count - 1 + depth) * pace + 2 * (depth - 1) * self.site.hop_s(
            self.size
        )
        return np.where(slow, np.inf, bounds)


def _orders(site: Site, leaf: _Leaf) -> Iterator[tuple[Post, ...]]:
    """Stages by the types' compute-memory ratio, most memory for its compute first; and the other way."""
    ratio = {kind: 1 / (site.pace_s(kind) * site.room_bytes(kind)) for kind in site.types}
    counted = sorted(zip(site.types, leaf.stages, strict=True), key=lambda pair: ratio[pair[0]])
    posts = tuple((kind, leaf.tp) for kind, n in counted for _ in range(n))
    yield posts
    yield posts[::-1]


def _cut(
    shortlist: Shortlist, site: Site, leaf: _Leaf, posts: tuple[Post, ...], kind: ScheduleKind
) -> Seconds:
    total = site.request.global_batch // leaf.size
    count = -(-total // leaf.copies)
    cut = cut_line(site, posts, leaf.size, count, kind)
    if cut is None:
        return float("inf")
    seconds = line_seconds(site, cut, count, leaf.copies, leaf.size)
    for by_pipeline in (False, True):
        shortlist.add(seconds, partial(_draw, site, leaf, posts, cut, kind, by_pipeline), leaf)
    return seconds


def _draw(
    site: Site,
    leaf: _Leaf,
    posts: tuple[Post, ...],
    cut: Cut,
    kind: ScheduleKind,
    by_pipeline: bool,
) -> Plan | None:
    counts = largest_remainder(site.request.global_batch // leaf.size, [1] * leaf.copies)
    lines = [Line(posts, cut.bounds, leaf.size, count) for count in counts]
    return seated(site, lines, kind, by_pipeline)
