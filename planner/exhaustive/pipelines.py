"""Every pipeline that some devices can form for some samples, without those that provably cost too much.

Three things are left out, each with a proof:

1. *A lower bound reaches the cutoff.* ``Shape.bound_s`` and the bounds on the way to it are lower bounds of
   the iteration time of every plan that holds the pipeline. Proof. Clocks are maxima of sums of
   non-negative terms (``cost.simulate``), so a clock is at least the length of any chain of actions and
   messages that wait for each other. Chain of stage s: its slowest replica cannot start before one
   micro-batch went forward through all stages before it (at least the fastest replica and the fastest
   message of each, since a replica waits for at least one of the stage before), then computes M forwards
   and backwards one after the other, then its last gradient has to go back through the stages before it, in
   the same way. So a pipeline ends no earlier than ``sum over i < s (f_i + b_i + hops) + M t_s``. The
   stages that are not chosen yet: whatever they are, each micro-batch needs the rest of its blocks computed
   on the rest of the devices. Count block j as u_j seconds a sample, u_j the least over all devices and
   shares; a device needs at least r >= 1 seconds for one of these, r the least ratio over the blocks that
   are left. So if the slowest replica of the rest needs t a micro-batch, the rest can do at most t * sum(1
   / r), hence ``t >= micro_batch * sum(u_j) / sum(1 / r)``, and the chain of that replica's stage begins
   behind all stages chosen so far; the same holds for the blocks and devices of one stage. Messages are
   priced here as if no other device sent at once: more senders are never faster (``cost.links``), so a plan
   around the pipeline only adds to them. What an end does itself to receive counts as part of its action
   instead of the message, which makes no chain shorter. The same holds for the simulation of the pipeline
   alone, which follows. Reductions: beside k - 1 other pipelines every segment of a stage
   of width w is summed over n >= w + k - 1 replicas, in 2 (n - 1) messages of at least P / n bytes; a
   message of x bytes takes at least x times the least seconds a byte of any link that can occur. A rank
   does its own one after the other after its last action, so it needs at least ``2 (n - 1) / n * P *
   least``, which grows with n.
2. *Recomputation where the stage fits without it.* It lengthens backwards, changes nothing else, and clocks
   grow with durations.
3. *Images*: plans that differ by a swap of interchangeable devices have one price (``exhaustive.pools``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import inf

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Replica, ScheduleKind, Stage
from arachne_runtime.plan.rows import consecutive, overlaps
from arachne_runtime.units import Bytes, Seconds

from ..cost.actors import Seat, actors_of, crossings, crowd_of
from ..cost.memory import in_flight, stage_memory
from ..cost.simulate import Stages, play
from ..cost.sync import commit_seconds
from ..cost.tables import Tables
from .pools import Pool, Vector, vectors_within

Line = tuple[tuple[int, int], ...]
"""A stage's replicas in order: (pool, share)."""

Spans = tuple[tuple[int, int, bool, Line], ...]
"""Stages: (first block, end, recompute, replicas)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A stage that fits: what bounds need to know of its replicas."""

    recompute: bool
    least_s: Seconds
    """Forward and backward of its fastest replica, which every chain through the stage takes at least."""
    slowest_s: Seconds
    update_s: Seconds


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline on pools: blocks, replicas, recomputation and micro-batches, and its bound."""

    micro_batch: int
    micro_batches: int
    stages: Spans
    ready_s: tuple[Seconds, ...]
    """When each stage is done if the pipeline has every link to itself."""
    bound_s: Seconds

    def pipeline(self, pools: tuple[Pool, ...], used: list[int]) -> Pipeline:
        """On concrete devices: the next free ones of each pool; ``used`` is moved on."""
        stages = []
        for start, stop, recompute, line in self.stages:
            replicas = []
            for pool, share in line:
                replicas.append(Replica(devices=(pools[pool].devices[used[pool]],), share=share))
                used[pool] += 1
            stages.append(Stage(layers=(start, stop), recompute=recompute, replicas=tuple(replicas)))
        return Pipeline(micro_batches=self.micro_batches, micro_batch=self.micro_batch, stages=tuple(stages))


class Space:
    """All pipelines of one request under one schedule."""

    def __init__(
        self, tables: Tables, pools: tuple[Pool, ...], kind: ScheduleKind, most_micro_batch: int
    ) -> None:
        self.tables = tables
        self.pools = pools
        self.kind = kind
        self.most_micro_batch = most_micro_batch
        self.nodes = [tables.fleet.node(node_of(pool.devices[0])) for pool in pools]
        self.num_blocks = tables.num_blocks
        self.considered = 0
        self._lines: dict[tuple[Vector, int], list[Line]] = {}
        self._fits: dict[tuple[Line, int, int, int], Fit | None] = {}
        self._hops: dict[tuple[Line, Line, int], Seconds] = {}
        self._actors: dict[Spans, tuple[Stages, Seconds]] = {}
        self._speeds: dict[tuple[Vector, int], float] = {}
        self._splits: dict[Vector, list[tuple[Vector, Vector]]] = {}

    def share_range(self, pool: int) -> tuple[int, int]:
        """Smallest and largest share that was measured on a pool's devices."""
        found = self.tables.samples_range(self.nodes[pool].device.name, 1)
        return found if found else (1, 0)

    def shapes(
        self, vector: Vector, samples: int, cutoff_s: Seconds, others: int = 0, per_byte: float = 0.0
    ) -> list[Shape]:
        """Pipelines of exactly ``vector`` for ``samples``, cheapest bound first, all bounds < ``cutoff_s``.

        ``others``: how many pipelines stand beside it; ``per_byte``: least seconds a byte between them.
        """
        found: list[Shape] = []
        for micro_batch in range(1, self.most_micro_batch + 1):
            if samples % micro_batch == 0:
                for depth in range(1, min(sum(vector), self.num_blocks) + 1):
                    search = _Search(self, vector, depth, micro_batch, samples // micro_batch, cutoff_s)
                    found += filter(None, (self._shape(search, s, others, per_byte) for s in search.all()))
        return sorted(found, key=lambda shape: shape.bound_s)

    def least_pace(self, vector: Vector, first: int = 0, end: int | None = None) -> Seconds:
        """No devices of ``vector`` do blocks ``first`` to ``end`` faster than this many seconds a sample."""
        key = (vector, first)
        speed = self._speeds.get(key)
        if speed is None:
            speed = sum(n / self._ratio[p][first] for p, n in enumerate(vector) if n)
            self._speeds[key] = speed
        work = self._units[first] - (0.0 if end is None else self._units[end])
        return work / speed if speed else inf

    def splits(self, left: Vector) -> list[tuple[Vector, Vector]]:
        """Every way to take some of the devices, with what is left."""
        found = self._splits.get(left)
        if found is None:
            found = self._splits[left] = [
                (v, tuple(a - b for a, b in zip(left, v, strict=True))) for v in vectors_within(left)
            ]
        return found

    def _shape(self, search: "_Search", stages: Spans, others: int, per_byte: float) -> Shape | None:
        """The pipeline alone, played; None where that reaches the cutoff."""
        self.considered += 1
        actors, commit = self._alone(search, stages)
        ready = tuple(map(max, play(self.kind, search.micro_batches, actors).ready_s))
        done = max(
            at + self._sync_floor(start, stop, len(line) + others, per_byte)
            for at, (start, stop, _, line) in zip(ready, stages, strict=True)
        )
        bound = done + commit + search.update_floor(stages) + self.tables.profile.step_s
        if bound >= search.cutoff_s:
            return None
        return Shape(search.micro_batch, search.micro_batches, stages, ready, bound)

    def _alone(self, search: "_Search", stages: Spans) -> tuple[Stages, Seconds]:
        """What is played, and the world's all-reduce: the same for every number of micro-batches."""
        found = self._actors.get(stages)
        if found is None:
            bare = Shape(search.micro_batch, search.micro_batches, stages, (), 0.0)
            pipeline = bare.pipeline(self.pools, [0] * len(self.pools))
            seats = tuple(
                tuple(Seat(r, self.tables.fleet.node(node_of(r.devices[0]))) for r in stage.replicas)
                for stage in pipeline.stages
            )
            crossed = crossings(pipeline, seats, self.tables)
            actors = actors_of(pipeline, seats, crossed, crowd_of([crossed]), self.tables)
            found = self._actors[stages] = actors, commit_seconds((seats,), self.tables)
        return found

    def _sync_floor(self, start: int, stop: int, members: int, per_byte: float) -> Seconds:
        if members < 2:
            return 0.0
        held = self.tables.own_parameters[stop] - self.tables.own_parameters[start]
        size = held * self.tables.model.bytes_per_parameter.gradient
        return 2 * (members - 1) / members * size * per_byte

    def lines(self, vector: Vector, micro_batch: int) -> list[Line]:
        """Every order of the devices of a stage, with every way to share a micro-batch among them."""
        key = (vector, micro_batch)
        found = self._lines.get(key)
        if found is None:
            ranges = [self.share_range(p) for p in range(len(vector))]
            found = self._lines[key] = [
                tuple(zip(order, shares, strict=True))
                for order in _orders(vector)
                for shares in _compositions(micro_batch, len(order))
                if all(ranges[p][0] <= n <= ranges[p][1] for p, n in zip(order, shares, strict=True))
            ]
        return found

    def fit(self, line: Line, start: int, stop: int, held: int) -> Fit | None:
        """The stage without recomputation if that fits, else with it, else None."""
        key = (line, start, stop, held)
        if key not in self._fits:
            recompute = next((r for r in (False, True) if self._fits_in(line, start, stop, held, r)), None)
            self._fits[key] = None if recompute is None else self._fit(line, start, stop, recompute)
        return self._fits[key]

    def _fits_in(self, line: Line, start: int, stop: int, held: int, recompute: bool) -> bool:
        return all(
            self._peak(pool, share, start, stop, held, recompute) <= self.nodes[pool].memory_bytes
            for pool, share in dict.fromkeys(line)
        )

    def _peak(self, pool: int, share: int, start: int, stop: int, held: int, recompute: bool) -> Bytes:
        device = self.nodes[pool].device
        memory = stage_memory(
            self.tables,
            start=start,
            stop=stop,
            device=device.name,
            tp=1,
            samples=share,
            held=held,
            recompute=recompute,
        )
        return memory.total + device.reserve_bytes

    def _fit(self, line: Line, start: int, stop: int, recompute: bool) -> Fit:
        names = [(self.nodes[pool].device.name, share) for pool, share in line]
        both = [sum(self.tables.stage_seconds(start, stop, d, 1, n, recompute)) for d, n in names]
        update = max(self.tables.update_seconds(start, stop, d, 1) for d, _ in names)
        return Fit(recompute, min(both), max(both), update)

    def hop(self, before: Line, after: Line, block: int) -> Seconds:
        """Least seconds of a message over the boundary before ``block``, there and back."""
        key = (before, after, block)
        found = self._hops.get(key)
        if found is None:
            rows = [consecutive([share for _, share in line]) for line in (before, after)]
            size = self.tables.output_bytes[block - 1]
            found = self._hops[key] = 2 * min(
                self._message(before[o.sender][0], after[o.receiver][0], size * len(o.rows))
                for o in overlaps(*rows)
            )
        return found

    def _message(self, a: int, b: int, size: Bytes) -> Seconds:
        devices = self.pools[a].devices[0], self.pools[b].devices[-1]
        return self.tables.fleet.link(node_of(devices[0]), node_of(devices[1])).seconds(size)

    @cached_property
    def _pace(self) -> list[list[Seconds]]:
        """Least seconds a sample of each block on each pool, over all shares."""
        rows = []
        for p in range(len(self.pools)):
            low, high = self.share_range(p)
            costs = [
                (n, self.tables.costs(self.nodes[p].device.name, 1, n))
                for n in range(low, min(high, self.most_micro_batch) + 1)
            ]
            rows.append(
                [
                    min(
                        (c.forward_s[j + 1] - c.forward_s[j] + c.backward_s[j + 1] - c.backward_s[j]) / n
                        for n, c in costs
                    )
                    if costs
                    else inf
                    for j in range(self.num_blocks)
                ]
            )
        return rows

    @cached_property
    def _unit(self) -> list[Seconds]:
        return [min(row[j] for row in self._pace) for j in range(self.num_blocks)]

    @cached_property
    def _units(self) -> list[Seconds]:
        """Sums of units from each block to the end."""
        return [sum(self._unit[j:]) for j in range(self.num_blocks + 1)]

    @cached_property
    def _ratio(self) -> list[list[float]]:
        """Least ratio of a pool's pace to the unit, over the blocks from each one on."""
        unit = self._unit
        ratios = [
            [inf if r == inf else r / u if u > 0 else 1.0 for r, u in zip(row, unit, strict=True)]
            for row in self._pace
        ]
        return [[min(row[j:], default=1.0) for j in range(self.num_blocks + 1)] for row in ratios]


class _Search:
    """Depth-first over the stages of one pipeline."""

    def __init__(
        self,
        space: Space,
        vector: Vector,
        depth: int,
        micro_batch: int,
        micro_batches: int,
        cutoff_s: Seconds,
    ) -> None:
        self.space = space
        self.vector = vector
        self.depth = depth
        self.micro_batch = micro_batch
        self.micro_batches = micro_batches
        self.cutoff_s = cutoff_s
        self.held = [in_flight(space.kind, s, depth, micro_batches) for s in range(depth)]

    def all(self) -> Iterator[Spans]:
        """Every list of stages whose bounds stay below the cutoff."""
        return self._grow(0, self.vector, (), 0.0)

    def update_floor(self, stages: Spans) -> Seconds:
        """Seconds of the slowest optimizer among the stages."""
        fits = (
            self.space.fit(line, start, stop, self.held[s]) for s, (start, stop, _, line) in enumerate(stages)
        )
        return max(fit.update_s for fit in fits if fit)

    def _grow(self, start: int, left: Vector, done: Spans, before_s: Seconds) -> Iterator[Spans]:
        s = len(done)
        behind = self.depth - s - 1
        for vector, rest in self.space.splits(left) if behind else ((left, ()),):
            if behind and sum(rest) < behind:
                continue
            stops = [j for j in self._stops(start, behind) if self._can_win(start, j, vector, rest, before_s)]
            for line in self.space.lines(vector, self.micro_batch) if stops else ():
                reach = before_s + (self.space.hop(done[-1][3], line, start) if done else 0.0)
                for stop in stops:
                    fit = self.space.fit(line, start, stop, self.held[s])
                    if (
                        fit is None
                        or reach + self.micro_batches * fit.slowest_s + fit.update_s >= self.cutoff_s
                    ):
                        continue
                    grown = (*done, (start, stop, fit.recompute, line))
                    if behind:
                        yield from self._grow(stop, rest, grown, reach + fit.least_s)
                    else:
                        yield grown

    def _can_win(self, start: int, stop: int, vector: Vector, rest: Vector, before_s: Seconds) -> bool:
        """Whether the work of the stage, and of what is behind it, can be done in time by their devices."""
        most = (self.cutoff_s - before_s) / (self.micro_batches * self.micro_batch)
        space = self.space
        return space.least_pace(vector, start, stop) < most and (
            not rest or space.least_pace(rest, stop) < most
        )

    def _stops(self, start: int, behind: int) -> range:
        last = self.space.num_blocks - behind
        return range(start + 1, last + 1) if behind else range(last, last + 1)


def _orders(vector: Vector) -> Iterator[tuple[int, ...]]:
    """Every different sequence that holds ``vector[p]`` times pool p."""
    places = range(sum(vector))

    def fill(pool: int, free: tuple[int, ...], taken: dict[int, int]) -> Iterator[tuple[int, ...]]:
        if pool == len(vector):
            yield tuple(taken[i] for i in places)
            return
        for chosen in combinations(free, vector[pool]):
            rest = tuple(i for i in free if i not in chosen)
            yield from fill(pool + 1, rest, taken | dict.fromkeys(chosen, pool))

    yield from fill(0, tuple(places), {})


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``total`` as ``parts`` positive integers, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))
