"""Lower bounds on whole pipelines and on what is left of one, by dynamic programming over devices and blocks.

Clocks are maxima of sums of non-negative terms (``cost.simulate``), so a clock is at least the length of any
chain of actions and messages that wait for each other. Take a stage whose slowest replica needs t = f + b for
a micro-batch and runs h micro-batches ahead (its warm-up), and let one micro-batch go from it to the end of
the pipeline and back within w, both messages included (its *trip*: at least the fastest replica and message
of each stage, since a replica waits for at least one of its neighbours). Its last of M backwards ends after
its start no earlier than

- ``M t``: its actions one after the other;
- ``w + M t - (h - 1) f``: the first forward, its trip, all backwards and the forwards between them;
- ``2 w + (M - h + 1) t`` where M > h: the first forward, its trip, by turns one backward and one forward up
  to the last forward, its trip, the last backward;
- one forward and one backward more, with messages, than the stage behind it.

Sending and receiving may keep a replica from computing. That counts for M - 1 micro-batches in the first of
these, for M - h in the second, for M - h - 1 in the third: what it does for the others falls into a trip.

It is through with reductions and optimizer no earlier than its tail after that. The least over all lines,
cuts and orders of what is left is taken of each figure by itself, so each holds for every way to go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Bytes, Seconds

from ..cost.links import Link
from ..cost.memory import in_flight
from .lines import Array, Grid, Lines
from .pools import Vector, splits, vectors_within
from .tails import Tails

NEVER_S = -1e300
"""A bound that never binds; finite, since with an infinite one it has to stay infinite."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Least seconds from the start of what is left, by devices, stages behind the first one, first block."""

    trip: list[Grid]
    """One micro-batch forward and backward through all of it."""
    ready: list[Grid]
    """Until its first stage has done its last backward."""
    finish: list[Grid]
    """Until all of it is through with reductions and optimizer."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """Least figures of a stage over its lines: (devices, micro-batch counts, first block, end)."""

    counts: Array
    held: Array
    """Micro-batches in flight."""
    pace: Array
    """All micro-batches on the slowest replica."""
    once: Array
    """The same less the forwards of the warm-up but one."""
    twice: Array
    """What the slowest replica computes between two trips; ``NEVER_S`` where there are not two."""
    forward: Array
    backward: Array
    tail: Array


class Floors:
    """Lower bounds of the pipelines of a request under one schedule."""

    def __init__(
        self, lines: Lines, kind: ScheduleKind, room: Vector, tails: Tails, batch: int, most_micro_batch: int
    ) -> None:
        self.lines = lines
        self.kind = kind
        self.tails = tails
        self.batch = batch
        self.most_micro_batch = most_micro_batch
        self.num_blocks = lines.num_blocks
        self.room = room
        self.vectors = list(vectors_within(room))
        self.at = {v: i for i, v in enumerate(self.vectors)}
        self.depth = min(sum(room), self.num_blocks)
        self._sizes = [sum(v) for v in self.vectors]
        self._splits = [
            [(self.at[v], self.at[r]) for v, r in splits(left) if any(r)] for left in self.vectors
        ]
        self._hops: dict[tuple[Vector, Vector, int], NDArray[np.float64]] = {}
        self._rests: dict[tuple[int, int], Rest] = {}

    def pipeline(self, vector: Vector, samples: int) -> Seconds:
        """No pipeline of exactly these devices does these samples faster."""
        at = self.at[vector]
        return min(
            self.rest(size, samples // size).finish[at][behind][0]
            for size in range(1, self.most_micro_batch + 1)
            if samples % size == 0
            for behind in range(min(self._sizes[at], self.num_blocks))
        )

    def rest(self, micro_batch: int, micro_batches: int) -> Rest:
        """Bounds for one size and number of micro-batches."""
        found = self._rests.get((micro_batch, micro_batches))
        if found is None:
            alone = self.tails.beside.others == 0
            counts = [micro_batches] if alone else range(1, self.batch // micro_batch + 1)
            tables = self._solve(micro_batch, counts)
            for i, count in enumerate(counts):
                self._rests[micro_batch, count] = Rest(
                    *(t[:, :, i].transpose(1, 0, 2).tolist() for t in tables)
                )
            found = self._rests[micro_batch, micro_batches]
        return found

    def hop(self, before: Vector, after: Vector, micro_batch: int, behind: int) -> NDArray[np.float64]:
        """Least seconds of a message between two of these devices, by the block behind it.

        A single device sends or receives all rows of a micro-batch, one message after the other. Groups of
        devices send and gather parts, which together are no less than the whole.
        """
        single = sum(before) == 1 or (behind == 1 and sum(after) == 1)
        return self._message(before, after, micro_batch if single else 1)

    def busy(self, devices: Vector, others: Vector, micro_batch: int) -> NDArray[np.float64]:
        """Least seconds of a micro-batch for which messages over a boundary keep a replica on these devices.

        It has at least one row, whose output and gradient cross; a single device has all of them.
        """
        nodes = [self.lines.nodes[p] for p, n in enumerate(devices) if n]
        if not any(others) or any(node.device.hop_overlaps for node in nodes):
            return np.zeros(self.num_blocks + 1)
        return 2 * self._message(devices, others, micro_batch if sum(devices) == 1 else 1)

    def _message(self, before: Vector, after: Vector, rows: int) -> NDArray[np.float64]:
        key = (tuple(map(bool, before)), tuple(map(bool, after)), rows)
        found = self._hops.get(key)
        if found is None:
            pools, fleet = self.lines.pools, self.lines.tables.fleet
            links = [
                fleet.link(node_of(pools[p].devices[0]), node_of(pools[q].devices[-1]))
                for p, m in enumerate(before)
                for q, n in enumerate(after)
                if m and n
            ]
            sizes = [rows * size for size in self.lines.tables.output_bytes[:-1]]
            grouped = any(max(self.lines.degrees[p]) > 1 for p, n in enumerate(before) if n)
            row = [0.0, *(min(_alone(link, size, grouped) for link in links) for size in sizes), 0.0]
            found = self._hops[key] = np.array(row)
        return found

    def _solve(self, micro_batch: int, counts: Sequence[int]) -> tuple[Array, Array, Array]:
        """Trip, ready and finish by (stages behind, devices, count, first block)."""
        end = self.num_blocks
        shape = (self.depth, len(self.vectors), len(counts), end + 1)
        trip, ready, finish = np.full(shape, inf), np.full(shape, inf), np.full(shape, inf)
        into = [self._into(left, micro_batch) for left in self.vectors]
        for behind in range(self.depth):
            stage = self._stages(micro_batch, counts, behind)
            fits = np.asarray(np.isfinite(stage.pace).any(axis=(1, 2, 3)))
            if behind == 0:
                busy = np.array([into[i][i] for i in range(len(self.vectors))])[:, None, :]
                trip[0] = (stage.forward + stage.backward)[..., end]
                ready[0] = stage.pace[..., end] + (stage.counts[..., 0] - 1) * busy
                finish[0] = ready[0] + stage.tail[..., end]
                continue
            for i in range(len(self.vectors)):
                pairs = [(v, r) for v, r in self._splits[i] if fits[v] and self._sizes[r] >= behind]
                if pairs:
                    v, r = np.array(pairs).T
                    rest = trip[behind - 1, r], ready[behind - 1, r], finish[behind - 1, r]
                    links = self._links(pairs, into[i], micro_batch, behind)
                    trip[behind, i], ready[behind, i], finish[behind, i] = _least(stage, v, rest, *links)
        return trip, ready, finish

    def _links(
        self,
        pairs: Sequence[tuple[int, int]],
        into: dict[int, NDArray[np.float64]],
        micro_batch: int,
        behind: int,
    ) -> tuple[Array, Array]:
        """Messages between a first stage and what is behind it, and how long all messages keep it busy."""
        both = [(self.vectors[v], self.vectors[r]) for v, r in pairs]
        hops = np.array([self.hop(*pair, micro_batch, behind) for pair in both])
        out = np.array([self.busy(*pair, micro_batch) for pair in both])
        into_s = np.array([into[v] for v, _ in pairs])
        return hops[:, None, None, :], into_s[:, None, :, None] + out[:, None, None, :]

    def _into(self, left: Vector, micro_batch: int) -> dict[int, NDArray[np.float64]]:
        """Busy seconds of a first stage of what is left, by its devices: messages come from elsewhere."""
        elsewhere = tuple(n - m for n, m in zip(self.room, left, strict=True))
        return {self.at[v]: self.busy(v, elsewhere, micro_batch) for v in vectors_within(left)}

    def _stages(self, micro_batch: int, counts: Sequence[int], behind: int) -> _Stage:
        end = self.num_blocks
        held = [in_flight(self.kind, 0, behind + 1, m) for m in counts]
        table = np.full((6, len(self.vectors), len(counts), end + 1, end + 1), inf)
        known: dict[tuple[int, ...], Array] = {}
        for i, vector in enumerate(self.vectors):
            lines = self.lines.lines(vector, micro_batch)
            looks = tuple(sorted({line.look for line in lines}))
            if lines:
                if looks not in known:
                    rows = [self._best(looks, m, h) for m, h in zip(counts, held, strict=True)]
                    known[looks] = np.stack(rows, axis=1)
                table[:5, i] = known[looks]
                table[5, i] = self.tails.least(lines)
        return _Stage(np.array(counts)[:, None, None], np.array(held)[:, None, None], *table)

    def _best(self, looks: Sequence[int], m: int, h: int) -> Array:
        """The first five figures of a stage for one count, of which ``h`` are in flight."""
        costs = [self.lines.costs(look, h) for look in looks]
        pace = np.minimum.reduce([c.slowest for c in costs])
        once = np.minimum.reduce([m * c.slowest - (h - 1) * c.lead for c in costs])
        forward = np.minimum.reduce([c.forward for c in costs])
        backward = np.minimum.reduce([c.backward for c in costs])
        twice = (m - h + 1) * pace if m > h else np.full_like(pace, NEVER_S)
        return np.stack([m * pace, once, twice, forward, backward])


def _alone(link: Link, size: Bytes, grouped: bool) -> Seconds:
    return link.latency_s + size * link.seconds_per_byte if grouped else link.seconds(size)


def _least(stage: _Stage, v: Array, rest: tuple[Array, ...], hop: Array, busy: Array) -> tuple[Array, ...]:
    """The least of every first stage ``v`` with the rest behind it, over devices and cuts."""
    trip, ready, finish = (table[:, :, None, :] for table in rest)
    m, ahead = stage.counts, stage.counts - stage.held
    through = stage.forward[v] + stage.backward[v] + 2 * hop
    wait = trip + 2 * hop
    first = np.maximum.reduce(
        [
            stage.pace[v] + (m - 1) * busy,
            stage.once[v] + wait + ahead * busy,
            stage.twice[v] + 2 * wait + np.maximum(0, ahead - 1) * busy,
            through + ready,
        ]
    )
    all_done = np.maximum(first + stage.tail[v], stage.forward[v] + hop + finish)
    return tuple(np.min(table, axis=(0, 3)) for table in (through + trip, first, all_done))
