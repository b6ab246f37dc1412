"""What every pipeline that some devices can form costs at the least: its messages, its rings, its optimizers.

A column, in the word of column generation, fixes a pipeline's stages, cut, micro-batch and count, but not
yet its shares. Its bound takes for every stage the best shares (``StageTables`` with floors), for every hop
an idle link, for every other stage the fastest replica.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import comb, inf, prod

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.units import Seconds

from ...cost.links import Link
from ...cuts import Table
from ...request import Request
from ..counts import Counts
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
    besides_s: tuple[Seconds, ...]
    """Until a stage is done, the least that none of its replicas computes: it waits, sends and receives."""
    waits_s: tuple[Seconds, ...]
    """The same with all micro-batches but those in flight, and one of these, left to compute."""
    update_s: Seconds
    """The slowest optimizer step."""
    bound_s: Seconds
    """The iteration takes at least so long."""

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.micro_batch * self.micro_batches


@dataclass(frozen=True, slots=True)
class Beside:
    """The pipelines beside a column, as far as its reductions have to do with them."""

    others: int
    """How many at least; each has a replica of every block."""
    shared_s: float
    """Seconds a byte of the fastest link to any of them that its ranks share; ``inf``: none."""
    inside_s: float
    """The same of links that every rank has to itself."""


ALONE = Beside(0, inf, inf)


class Columns:
    """All columns of a request, by vector of devices; ``check`` is called often and raises to stop."""

    def __init__(self, request: Request, pools: Pools, check: Callable[[], None] = lambda: None) -> None:
        self.request = request
        self.check = check
        self.pools = pools
        self.stage_tables = StageTables(request, floors=True)
        self.hardware = [self.stage_tables.hardware(pool.seats[0][0], pool.tp) for pool in pools.pools]
        self._hops: dict[tuple[Counts, Counts, int], Array] = {}
        self._busy: dict[tuple[Counts, Counts, int], Array] = {}
        self._mixes: dict[Counts, Mix] = {}
        self._rings: dict[Counts, tuple[int, int, float]] = {}
        self._besides: dict[tuple[Counts, Counts], tuple[float, float]] = {}
        names = sorted({node_of(d) for pool in pools.pools for seat in pool.seats for d in seat})
        links = [request.fleet.link(a, b) for a in names for b in names]
        self.least_latency_s = min(link.latency_s for link in links)
        self._updates: dict[Mix, Table] = {}
        self._fastest: dict[tuple[Mix, int], tuple[Table, Table]] = {}

    def beside_any(self, vector: Counts) -> Beside:
        """At least one pipeline on what ``vector`` leaves."""
        left = tuple(n - m for n, m in zip(self.pools.counts, vector, strict=True))
        return Beside(1, *self._fastest_links(vector, left))

    def beside(self, packing: Sequence[Counts], at: int) -> Beside:
        """The other pipelines of a packing: the ring has a link to each, and the slowest sets its pace."""
        links = [self._fastest_links(packing[at], v) for i, v in enumerate(packing) if i != at]
        return Beside(len(links), *max(links, key=min)) if links else ALONE

    def _fastest_links(self, a: Counts, b: Counts) -> tuple[float, float]:
        found = self._besides.get((a, b))
        if found is None:
            links = list(self._links(a, b))
            found = self._besides[a, b] = (
                min((k.seconds_per_byte for k in links if k.shared), default=inf),
                min((k.seconds_per_byte for k in links if not k.shared), default=inf),
            )
        return found

    def counts(self, micro_batch: int, alone: bool) -> Sequence[int]:
        """Numbers of micro-batches, ascending."""
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

    def busy(self, stage: Counts, other: Counts, micro_batch: int) -> Array:
        """Least seconds that one way over a boundary keeps a replica of ``stage`` busy, by block.

        A single replica has all rows, in a message for each replica on the other side; any has at least one.
        """
        rows, messages = (micro_batch, sum(other)) if sum(stage) == 1 else (1, 1)
        key = stage, other, rows
        if key not in self._busy:
            pools = [pool for n, pool in zip(stage, self.pools.pools, strict=True) if n]
            nodes = [self.request.fleet.node(node_of(pool.seats[0][0])) for pool in pools]
            row = np.zeros(self.stage_tables.num_blocks + 1)
            if not any(node.device.hop_overlaps for node in nodes):
                links, streams = list(self._links(stage, other)), self._streams(stage, other)
                latency = min(k.latency_s for k in links)
                per_byte = min(_least_per_byte(k, streams) for k in links)
                sizes = np.asarray(self.request.tables.output_bytes[:-1], float)
                row[1:-1] = messages * latency + rows * sizes * per_byte
            self._busy[key] = row
        return self._busy[key]

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

    def ring(self, stage: Counts) -> tuple[int, int, float]:
        """Replicas of a stage, devices of the smallest, and seconds a byte of the slowest link among them.

        The member with the fewest devices moves the largest shard: its part of the bytes.
        """
        found = self._rings.get(stage)
        if found is None:
            nodes: dict[str, int] = {}
            for n, pool in zip(stage, self.pools.pools, strict=True):
                for seat in pool.seats[:n]:
                    nodes[node_of(seat[0])] = nodes.get(node_of(seat[0]), 0) + 1
            tp = min(pool.tp for n, pool in zip(stage, self.pools.pools, strict=True) if n)
            links = self.request.fleet.links_among(tuple(nodes), max(nodes.values()) > 1)
            per_byte = max(_least_per_byte(k, tp) for k in links) if sum(stage) > 1 else 0.0
            found = self._rings[stage] = sum(stage), tp, per_byte
        return found

    def reduced(self, size: Array, width: Array, tp: Array, per_byte: Array, beside: Beside) -> Array:
        """Least seconds of a stage's reductions: rings in which every other pipeline has a member."""
        members = width + beside.others
        if beside.others:
            per_byte = np.maximum(per_byte, np.minimum(beside.shared_s, beside.inside_s / tp))
        messages = 2 * (members - 1)
        seconds = messages * (self.least_latency_s + size / members * per_byte)
        return np.where((size > 0) & (members > 1), seconds, 0.0)

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
