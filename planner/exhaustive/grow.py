"""Every pipeline of some devices whose bounds stay below a cutoff, stage by stage, depth first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.rows import consecutive, overlaps
from arachne_runtime.units import Seconds

from ..cost.actors import Crossing, Seat, crowd_of, messages_of
from ..cost.memory import in_flight
from .floors import Floors, Rest
from .lines import Costs, Line, Lines
from .pools import Vector, splits
from .tails import Tails

Span = tuple[int, int, bool, Line]
"""A stage: (first block, end, recompute, replicas)."""

Spans = tuple[Span, ...]


class Hops:
    """Messages between the replicas of two stages, as if no other stage sent anything."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._known: dict[tuple[Line, Line], tuple[list[Seconds], list[Seconds], list[Seconds]]] = {}

    def between(self, before: Line, after: Line) -> tuple[list[Seconds], list[Seconds], list[Seconds]]:
        """By the block behind the boundary: least seconds of a message there and of one back, and how long
        the messages of a micro-batch keep a replica behind it busy.
        """
        found = self._known.get((before, after))
        if found is None:
            found = self._known[before, after] = self._between(before, after)
        return found

    def _between(self, before: Line, after: Line) -> tuple[list[Seconds], list[Seconds], list[Seconds]]:
        tables = self.lines.tables
        used = [0] * len(self.lines.pools)
        a, b = self._seats(before, used), self._seats(after, used)
        crossed = overlaps(*(consecutive([seat.replica.share for seat in row]) for row in (a, b)))
        there, back, busy = [0.0], [0.0], [0.0]
        for size in tables.output_bytes[:-1]:
            crossing = Crossing(a, b, crossed, size)
            messages = messages_of(crossing, crowd_of([[crossing]]), tables)
            there.append(min(messages.forward.landed_s))
            back.append(min(messages.backward.landed_s))
            each = [0.0] * after.width
            for i, o in enumerate(crossed):
                each[o.receiver] += messages.forward.receiver_busy_s[i] + messages.backward.sender_busy_s[i]
            busy.append(min(each))
        return there, back, busy

    def _seats(self, line: Line, used: list[int]) -> tuple[Seat, ...]:
        replicas = self.lines.replicas(line, used)
        return tuple(Seat(r, self.lines.tables.fleet.node(node_of(r.devices[0]))) for r in replicas)


@dataclass(frozen=True, slots=True)
class _Branch:
    """Devices for the next stage, with bounds on what is behind it by its end (block)."""

    vector: Vector
    rest: Vector
    wait_s: Sequence[Seconds]
    """From the end of a forward to the start of the same micro-batch's backward."""
    ready_s: Sequence[Seconds]
    """From the end of the first forward to the start of the last backward."""
    finish_s: Sequence[Seconds]
    """From the end of the first forward to the end of the last tail behind."""
    busy_s: Sequence[Seconds]
    """How long the messages of a micro-batch to and from what is behind keep a replica busy."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """The first stages of a pipeline."""

    stages: Spans
    left: Vector
    there_s: Seconds
    """The first micro-batch gets to the end of the last of them no earlier."""
    back_s: Seconds
    """From the start of its backward there to the end of the one at the first stage."""
    tail_s: Seconds
    """The most that a stage's tail goes on after that: no tail is through before ``there_s``, what comes
    behind, ``back_s`` and this together."""
    mirrored: bool
    """Whether it is its own mirror image."""

    @property
    def start(self) -> int:
        """The next block."""
        return self.stages[-1][1] if self.stages else 0


class Search:
    """Pipelines of one depth, size and number of micro-batches.

    Of plans with one price it finds at least one: those with the order of all rows mirrored, and those with
    another order of a stage whose neighbours are single replicas, which changes no message but who gets it.
    Recomputation is left out where a stage fits without it: it lengthens backwards and changes nothing else.
    """

    def __init__(
        self,
        hops: Hops,
        floors: Floors,
        tails: Tails,
        depth: int,
        micro_batch: int,
        micro_batches: int,
        cutoff_s: Seconds,
    ) -> None:
        self.hops = hops
        self.lines = hops.lines
        self.floors = floors
        self.tails = tails
        self.depth = depth
        self.micro_batch = micro_batch
        self.micro_batches = micro_batches
        self.cutoff_s = cutoff_s
        self.held = [in_flight(floors.kind, s, depth, micro_batches) for s in range(depth)]
        self._known: dict[tuple[Vector, int], list[_Branch]] = {}

    def all(self, vector: Vector) -> Iterator[Spans]:
        """Every list of stages whose bounds stay below the cutoff."""
        if self._rest.finish[self.floors.at[vector]][self.depth - 1][0] < self.cutoff_s:
            yield from self._grow(_Grown((), vector, 0.0, 0.0, -inf, True))

    @cached_property
    def _rest(self) -> Rest:
        return self.floors.rest(self.micro_batch, self.micro_batches)

    def _grow(self, grown: _Grown) -> Iterator[Spans]:
        behind = self.depth - len(grown.stages) - 1
        last = self.lines.num_blocks - behind
        for branch in self._branches(grown.left, behind):
            every = range(grown.start + 1, last + 1) if behind else (last,)
            ends = [j for j in every if grown.there_s + branch.finish_s[j] < self.cutoff_s]
            for line in self._orders(grown, branch.vector, behind) if ends else ():
                for more in self._cuts(grown, branch, line, ends):
                    if behind:
                        yield from self._grow(more)
                    else:
                        yield more.stages

    def _cuts(self, grown: _Grown, branch: _Branch, line: Line, ends: Sequence[int]) -> Iterator[_Grown]:
        """Each end of the stage that leaves a chance; first without the messages from the stage before."""
        start, held = grown.start, self.held[len(grown.stages)]
        costs = self.lines.costs(line.look, held)
        slowest, _, forward, backward = (grid[start] for grid in costs.grids)
        tail = self.tails.grid(line)[start]
        there, back, busy, arrived = grown.there_s, grown.back_s, 0.0, not grown.stages
        for j in ends:
            while slowest[j] < inf:
                finish = forward[j] + branch.finish_s[j]
                ready = self._ready(costs, branch, start, j, held, busy)
                if there + max(finish, ready + max(tail[j], back + grown.tail_s)) >= self.cutoff_s:
                    break
                if arrived:
                    yield _Grown(
                        (*grown.stages, (start, j, bool(costs.recompute[start, j]), line)),
                        branch.rest,
                        there + forward[j],
                        back + backward[j],
                        max(grown.tail_s, tail[j] - back),
                        grown.mirrored and line.palindrome,
                    )
                    break
                hops = self.hops.between(grown.stages[-1][3], line)
                there, back, busy, arrived = (
                    there + hops[0][start],
                    back + hops[1][start],
                    hops[2][start],
                    True,
                )

    def _ready(self, costs: Costs, branch: _Branch, i: int, j: int, held: int, busy_s: Seconds) -> Seconds:
        """Least seconds from the start of blocks i..j-1 to their last backward (``exhaustive.floors``)."""
        slowest, lead, forward, backward = costs.grids
        t, m, wait = slowest[i][j], self.micro_batches, branch.wait_s[j]
        busy_s += branch.busy_s[j]
        return max(
            m * t + (m - 1) * busy_s,
            m * t - (held - 1) * lead[i][j] + wait + (m - held) * busy_s,
            (m - held + 1) * t + 2 * wait + (m - held - 1) * busy_s if m > held else 0.0,
            forward[i][j] + backward[i][j] + branch.ready_s[j],
        )

    def _orders(self, grown: _Grown, vector: Vector, behind: int) -> Iterator[Line]:
        lines = self.lines.lines(vector, self.micro_batch)
        before = grown.stages[-1][3] if grown.stages else None
        single = before is None or before.width == 1
        unsorted = (
            before is not None
            and not before.ascending
            and (len(grown.stages) == 1 or grown.stages[-2][3].width == 1)
        )
        for line in lines:
            mirror = grown.mirrored and not line.first_image
            other_before = unsorted and line.width == 1
            other = single and not behind and not line.ascending
            if not (mirror or other_before or other):
                yield line

    def _branches(self, left: Vector, behind: int) -> list[_Branch]:
        found = self._known.get((left, behind))
        if found is None:
            ways = splits(left) if behind else [(left, ())]
            found = self._known[left, behind] = [
                self._branch(vector, rest, behind)
                for vector, rest in ways
                if sum(rest) >= behind and self.lines.lines(vector, self.micro_batch)
            ]
        return found

    def _branch(self, vector: Vector, rest: Vector, behind: int) -> _Branch:
        if not behind:
            zeros = [0.0] * (self.lines.num_blocks + 1)
            return _Branch(vector, rest, zeros, zeros, zeros, zeros)
        at, floors = self.floors.at[rest], self._rest
        hop = self.floors.hop(vector, rest, self.micro_batch, behind)
        return _Branch(
            vector,
            rest,
            (np.asarray(floors.trip[at][behind - 1]) + 2 * hop).tolist(),
            (np.asarray(floors.ready[at][behind - 1]) + 2 * hop).tolist(),
            (np.asarray(floors.finish[at][behind - 1]) + hop).tolist(),
            self.floors.busy(vector, rest, self.micro_batch).tolist(),
        )
