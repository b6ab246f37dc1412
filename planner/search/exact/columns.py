"""Every pipeline that some devices can form, each with a proven lower bound of when its stages are done.

A column, in the word of column generation, fixes a pipeline's stages, cut, micro-batch and count, but not
yet its shares. Its bound takes for every stage the best shares (``StageTables`` with floors), for every hop
an idle link, for every other stage the fastest replica.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Seconds

from ...cost.links import Link
from ...cost.memory import in_flight
from ...request import Request
from ..counts import Counts, compositions
from ..cut import Table
from ..stage_tables import Hardware, Mix, StageTables
from .pools import Pools

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Stages and cut of a pipeline."""

    stages: tuple[Counts, ...]
    """Devices of each stage, by pool."""
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A pipeline but for its shares."""

    shape: Shape
    micro_batch: int
    micro_batches: int
    ready_s: tuple[Seconds, ...]
    """No replica of a stage that sets the pace is done earlier, by stage."""
    fill_s: tuple[Seconds, ...]
    """No stage starts earlier."""
    bound_s: Seconds
    """The iteration takes at least so long."""

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.micro_batch * self.micro_batches


class Columns:
    """All columns of a request, by vector of devices; ``check`` is called often and raises to stop."""

    def __init__(self, request: Request, pools: Pools, check: Callable[[], None] = lambda: None) -> None:
        self.request = request
        self.check = check
        self.pools = pools
        self.stage_tables = StageTables(request, floors=True)
        self.hardware = [self.stage_tables.hardware(pool.seats[0][0], pool.tp) for pool in pools.pools]
        self._hops: dict[tuple[Counts, Counts, int], Array] = {}
        self._mixes: dict[Counts, Mix] = {}
        self._rings: dict[tuple[Counts, int], tuple[Seconds, float]] = {}
        self._updates: dict[Mix, Table] = {}
        self._fastest: dict[tuple[Mix, int], tuple[Table, Table]] = {}

    def of(self, vector: Counts, kind: ScheduleKind, limit_s: Seconds, alone: bool) -> list[Column]:
        """Columns on all devices of ``vector`` that may end before ``limit_s``, soonest first.

        ``alone``: those that take the whole global batch, else those that stand beside at least one other.
        """
        by_depth: dict[int, list[tuple[Counts, ...]]] = defaultdict(list)
        for stages in compositions(vector, self.stage_tables.num_blocks):
            by_depth[len(stages)].append(stages)
        found: list[Column] = []
        for depth, shapes in sorted(by_depth.items()):
            for micro_batch in range(1, self.request.most_micro_batch + 1):
                fitting = [s for s in shapes if max(map(sum, s)) <= micro_batch]
                self.check()
                if fitting:
                    batch = _Batch(self, kind, depth, fitting, micro_batch, 0 if alone else 1)
                    for count in self._counts(micro_batch, alone):
                        self.check()
                        found += batch.columns(count, limit_s)
        return sorted(found, key=lambda c: (c.bound_s, c.samples))

    def _counts(self, micro_batch: int, alone: bool) -> Sequence[int]:
        most, rest = divmod(self.request.global_batch, micro_batch)
        if alone:
            return [most] if rest == 0 else []
        return range(1, most + 1)

    def mix(self, stage: Counts) -> Mix:
        """A stage's replicas by hardware."""
        found = self._mixes.get(stage)
        if found is None:
            counts: dict[Hardware, int] = {}
            for hardware, count in zip(self.hardware, stage, strict=True):
                if count:
                    counts[hardware] = counts.get(hardware, 0) + count
            found = self._mixes[stage] = tuple(sorted(counts.items()))
        return found

    def fastest(self, mix: Mix, micro_batch: int) -> tuple[Table, Table]:
        """Least forward and backward seconds of any replica under any share."""
        key = mix, micro_batch
        if key not in self._fastest:
            width = sum(count for _, count in mix)
            pairs = [
                self.stage_tables.seconds(hardware, n)
                for hardware, _ in mix
                for n in (range(1, micro_batch - width + 2) if width > 1 else [micro_batch])
                if self.stage_tables.least_samples(hardware) <= n <= self.stage_tables.most_samples(hardware)
            ]
            # where no share was measured, the stage is infinite anyway
            none = np.zeros((self.stage_tables.num_blocks + 1,) * 2)
            self._fastest[key] = (
                np.minimum.reduce([f for f, _ in pairs] or [none]),
                np.minimum.reduce([b for _, b in pairs] or [none]),
            )
        return self._fastest[key]

    def hops(self, before: Counts, after: Counts, micro_batch: int) -> Array:
        """Least seconds of a message between two stages, by the block behind the boundary."""
        key = before, after, micro_batch
        if key not in self._hops:
            links, streams = list(self._links(before, after)), self._streams(before, after)
            alone = sum(before) == 1 and sum(after) == 1
            messages = max(sum(before), sum(after)) if min(sum(before), sum(after)) == 1 else 1
            rows = micro_batch if messages > 1 or alone else 1
            row = np.zeros(self.stage_tables.num_blocks + 1)
            latency = min(k.latency_s for k in links)
            per_byte = min(_least_per_byte(k, streams) for k in links)
            for block in range(1, self.stage_tables.num_blocks):
                size = rows * self.request.tables.output_bytes[block - 1]
                whole = links[0].seconds(-(-size // streams), streams) if alone and len(links) == 1 else 0.0
                row[block] = max(whole, messages * latency + size * per_byte)
            self._hops[key] = row
        return self._hops[key]

    def _streams(self, before: Counts, after: Counts) -> int:
        """Most ranks of a group that send at once: as many as the smaller group of the two has."""
        largest = (
            max(pool.tp for n, pool in zip(stage, self.pools.pools, strict=True) if n)
            for stage in (before, after)
        )
        return min(largest)

    def _links(self, before: Counts, after: Counts) -> Iterator[Link]:
        for p, m in enumerate(before):
            for q, n in enumerate(after):
                if m and n:
                    a, b = self.pools.pools[p].seats[0][0], self.pools.pools[q].seats[-1][0]
                    yield self.request.fleet.link(node_of(a), node_of(b))

    @cached_property
    def all_links(self) -> tuple[tuple[Link, bool], ...]:
        """Every link between two devices, and whether it leaves a node."""
        names = [node_of(d) for pool in self.pools.pools for seat in pool.seats for d in seat]
        pairs = sorted(set(combinations(names, 2)))
        return tuple((self.request.fleet.link(a, b), a != b) for a, b in pairs)

    def nodes_of(self, stage: Counts) -> int:
        """Nodes that a stage's devices stand in."""
        nodes: set[str] = set()
        for n, pool in zip(stage, self.pools.pools, strict=True):
            nodes.update(node_of(seat[0]) for seat in pool.seats[:n])
        return len(nodes)

    def ring(self, stage: Counts, others: int) -> tuple[Seconds, float]:
        """Least seconds of a reduction over a stage and ``others``: fixed ones, and seconds a byte."""
        key = stage, others
        if key not in self._rings:
            tp = min(pool.tp for n, pool in zip(stage, self.pools.pools, strict=True) if n)
            self._rings[key] = self._ring(sum(stage) + others, self.nodes_of(stage) > 1, tp)
        return self._rings[key]

    def _ring(self, members: int, leaves: bool, least_tp: int) -> tuple[Seconds, float]:
        """A ring over at least so many members, one of whose edges leaves a node or not.

        The member with the fewest devices moves the largest shard: one of at least 1 / ``least_tp``.
        """
        if members < 2:
            return 0.0, 0.0
        links = [k for k, out in self.all_links if out or not leaves]
        messages = 2 * (members - 1)
        latency = min(k.latency_s for k in links)
        per_byte = min(_least_per_byte(k, least_tp) for k in links)
        return messages * latency, messages / members * per_byte

    def updates(self, mix: Mix) -> Table:
        """Seconds of the slowest optimizer of a stage, by its run of blocks."""
        if mix not in self._updates:
            slowest = np.zeros((self.stage_tables.num_blocks + 1,) * 2)
            for hardware, _ in mix:
                ends = range(self.stage_tables.num_blocks + 1)
                prefix = [
                    self.request.tables.update_seconds(0, j, hardware.device, hardware.tp) for j in ends
                ]
                slowest = np.maximum(slowest, np.subtract.outer(prefix, prefix).T)
            self._updates[mix] = slowest
        return self._updates[mix]


def _least_per_byte(link: Link, streams: int) -> float:
    """Of a message that so many ranks send in parts: they share a NIC, but not the links inside a node."""
    return link.seconds_per_byte if link.shared else link.seconds_per_byte / streams


def num_shapes(pool_counts: Counts, num_blocks: int) -> int:
    """Compositions with cuts of all vectors of devices: the columns for one micro-batch and count."""
    return sum(
        _compositions(vector, depth) * comb(num_blocks - 1, depth - 1)
        for vector in product(*(range(n + 1) for n in pool_counts))
        for depth in range(1, min(sum(vector), num_blocks) + 1)
    )


def _compositions(vector: Counts, depth: int) -> int:
    """Ordered ways to deal all of ``vector`` to exactly ``depth`` stages, by inclusion and exclusion."""
    return sum(
        (-1) ** empty * comb(depth, empty) * prod(comb(n + depth - empty - 1, n) for n in vector)
        for empty in range(depth)
    )


class _Batch:
    """All shapes of one depth at one micro-batch: arrays over (composition, cut, stage)."""

    def __init__(
        self,
        columns: Columns,
        kind: ScheduleKind,
        depth: int,
        shapes: list[tuple[Counts, ...]],
        micro_batch: int,
        others: int,
    ) -> None:
        self.of = columns
        self.kind = kind
        self.depth = depth
        self.shapes = shapes
        self.micro_batch = micro_batch
        self.others = others
        num_blocks = columns.stage_tables.num_blocks
        self.cuts = np.array([(0, *c, num_blocks) for c in combinations(range(1, num_blocks), depth - 1)])
        self.mixes = sorted({columns.mix(s) for shape in shapes for s in shape})
        at = {mix: i for i, mix in enumerate(self.mixes)}
        self.mix_CS = np.array([[at[columns.mix(s)] for s in shape] for shape in shapes])
        fast = [columns.fastest(mix, micro_batch) for mix in self.mixes]
        self.forward = self._gather([f for f, _ in fast])
        self.backward = self._gather([b for _, b in fast])
        self.hop = self._gather_hops()
        self.tail = self._tails()
        arrive = np.cumsum(self.forward[:, :, :-1] + self.hop, axis=2)
        self.fill = np.concatenate([np.zeros((*arrive.shape[:2], 1)), arrive], axis=2)

    def columns(self, micro_batches: int, limit_s: Seconds) -> Iterator[Column]:
        """Those with so many micro-batches that may end before the limit."""
        ready = self._ready(micro_batches)
        bound = (ready + self.tail).max(axis=2)
        for c, k in zip(*np.nonzero(bound < limit_s), strict=True):
            yield Column(
                Shape(self.shapes[c], tuple(int(x) for x in self.cuts[k])),
                self.micro_batch,
                micro_batches,
                tuple(ready[c, k].tolist()),
                tuple(self.fill[c, k].tolist()),
                float(bound[c, k]),
            )

    def _ready(self, count: int) -> Array:
        """Last stage to first: paced by its own work, by the first gradient, by the stage behind."""
        ready = np.empty_like(self.fill)
        first = self.fill[:, :, -1] + self.forward[:, :, -1]
        for s in range(self.depth - 1, -1, -1):
            held = in_flight(self.kind, s, self.depth, count)
            times = np.stack([self.of.stage_tables.stage(mix, self.micro_batch, held) for mix in self.mixes])
            pace = times[self.mix_CS[:, s, None], self.cuts[None, :, s], self.cuts[None, :, s + 1]]
            if s < self.depth - 1:
                first = first + self.backward[:, :, s + 1] + self.hop[:, :, s]
            after = first + count * self.backward[:, :, s] + (count - held) * self.forward[:, :, s]
            ready[:, :, s] = np.maximum(self.fill[:, :, s] + count * pace, after)
            if s < self.depth - 1:
                behind = ready[:, :, s + 1] + self.hop[:, :, s] + self.backward[:, :, s]
                ready[:, :, s] = np.maximum(ready[:, :, s], behind)
        return ready

    def _gather(self, tables: Sequence[Table]) -> Array:
        stacked = np.stack(tables)
        found: Array = stacked[self.mix_CS[:, None, :], self.cuts[None, :, :-1], self.cuts[None, :, 1:]]
        return found

    def _gather_hops(self) -> Array:
        hop = np.zeros((len(self.shapes), len(self.cuts), self.depth - 1))
        for c, shape in enumerate(self.shapes):
            for s in range(self.depth - 1):
                hop[c, :, s] = self.of.hops(shape[s], shape[s + 1], self.micro_batch)[self.cuts[:, s + 1]]
        return hop

    def _tails(self) -> Array:
        """After a stage is done: its own reduction, the slowest update of the pipeline, fixed seconds."""
        tables = self.of.request.tables
        own = np.asarray(tables.own_parameters, float)
        size_KS = (own[self.cuts[:, 1:]] - own[self.cuts[:, :-1]]) * tables.model.bytes_per_parameter.gradient
        rings = np.array([[self.of.ring(stage, self.others) for stage in shape] for shape in self.shapes])
        reduced = np.where(size_KS > 0, rings[:, None, :, 0] + rings[:, None, :, 1] * size_KS, 0.0)
        updates = self._gather([self.of.updates(mix) for mix in self.mixes]).max(axis=2, keepdims=True)
        return np.asarray(reduced + updates + tables.profile.step_s)
