"""Best of all plans of a small problem under the event-simulated price.

The space: any devices may stay idle; the others form any pipelines of any stages of any replicas (one
device each: TP 1, no ZeRO) in any order; any cuts; recomputation by stage; any micro-batch up to the
request's largest and any share of it; any numbers of micro-batches that add up to the global batch; each
schedule of the request. ``exhaustive.pipelines`` says what is left out and proves that it cannot be better.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from ..cost import Estimate, price
from ..cost.actors import seats_of
from ..cost.sync import commit_seconds, reductions_of
from ..request import Request
from .pipelines import Shape, Space
from .pools import Vector, find_pools, packings, symmetries

MOST_DEVICES = 6
MOST_BLOCKS = 6
MOST_BATCH = 16
MOST_MICRO_BATCH = 4

GROWTH = 1.7
"""The cutoff starts below any plan and grows by this factor until a plan is below it; of 1.1 to 2.0 the
least CPU time together on four slow random problems (18 s; 24 s with 1.2)."""

ROUNDS = 9
"""Then the cutoff is infinite, which ends the search: 1.7 ** 9 is 118 times the time of perfect sharing."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan, its price and what it took to know."""

    plan: Plan
    estimate: Estimate
    pipelines: int
    """Pipelines that were played."""
    plans: int
    """Plans that were priced."""


def best_plan(request: Request) -> Plan | None:
    """The plan of least price, or None where no plan fits. UsageError for a problem that is too large."""
    found = solve(request)
    return found.plan if found else None


def solve(request: Request) -> Best | None:
    """As ``best_plan``, with the price and the effort."""
    _refuse_large(request)
    found: Best | None = None
    for kind in request.schedules:
        run = _Run(request, kind)
        other = run.solve(found.estimate.iteration_s if found else None)
        found = other or found
    return found


def _refuse_large(request: Request) -> None:
    most = request.max_micro_batch
    for what, value, limit in (
        ("devices", len(request.cluster.devices), MOST_DEVICES),
        ("blocks", len(request.model.blocks), MOST_BLOCKS),
        ("samples of a global batch", request.global_batch, MOST_BATCH),
        ("samples of a micro-batch (max_micro_batch)", most or request.global_batch, MOST_MICRO_BATCH),
    ):
        if value > limit:
            raise UsageError(f"{value} {what} are too many to try every plan; at most {limit}")
    wide = [
        entry.device
        for entry in request.cluster.node
        if any(1 < tp <= entry.gpus for tp in request.tables.tp_degrees(entry.device))
    ]
    if wide:
        raise UsageError(f"{', '.join(wide)} was measured with TP > 1, which is not tried here; leave it out")


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows the last backwards of some pipelines, whatever their shares and counts."""

    reductions: list[tuple[tuple[tuple[int, int], ...], Seconds]]
    """In order: the (pipeline, stage) pairs that take part, and seconds."""
    after_s: Seconds
    """Commit, slowest optimizer and fixed seconds."""


class _Run:
    """One schedule of one request."""

    def __init__(self, request: Request, kind: ScheduleKind) -> None:
        self.request = request
        self.pools = find_pools(request.cluster)
        most = min(request.max_micro_batch or request.global_batch, request.global_batch)
        self.space = Space(request.tables, self.pools, kind, most)
        self.best: tuple[Plan, Estimate] | None = None
        self.cutoff_s: Seconds = 0.0
        self.priced = 0
        self._tails: dict[object, _Tail] = {}
        self._shapes: dict[tuple[Vector, int, int, float], list[Shape]] = {}

    def solve(self, below_s: Seconds | None) -> Best | None:
        """The best plan below ``below_s``, or None."""
        room = tuple(len(pool.devices) for pool in self.pools)
        every = list(packings(room, symmetries(self.request.cluster, self.pools)))
        every.sort(key=self._floor)
        limit = inf if below_s is None else below_s
        floor = self._floor(every[0])
        for cutoff in [*(floor * GROWTH**i for i in range(1, ROUNDS)), inf]:
            self.cutoff_s = min(cutoff, limit)
            self._shapes.clear()
            for packing in every:
                if self._floor(packing) < self.cutoff_s:
                    self._combine(packing)
            if self.best is not None:
                return Best(*self.best, pipelines=self.space.considered, plans=self.priced)
            if cutoff >= limit:
                break
        return None

    def _floor(self, packing: tuple[Vector, ...]) -> Seconds:
        """No plan on these devices is faster: all samples at the pace of all of them together."""
        return self.request.global_batch * self.space.least_pace(tuple(map(sum, zip(*packing, strict=True))))

    def _combine(self, packing: tuple[Vector, ...]) -> None:
        """Every choice of a pipeline for each vector that has the samples of the global batch together."""
        others = len(packing) - 1
        per_byte = self._least_per_byte(packing)
        for chosen in self._choices(packing, others, per_byte, self.request.global_batch, None):
            self._try(chosen)

    def _choices(
        self,
        packing: tuple[Vector, ...],
        others: int,
        per_byte: float,
        left: int,
        before: tuple[Vector, int, int] | None,
    ) -> Iterator[tuple[Shape, ...]]:
        vector, *rest = packing
        for samples in range(1, left - len(rest) + 1) if rest else (left,):
            if samples * self.space.least_pace(vector) >= self.cutoff_s:
                break
            if rest and not self._others_can(rest, left - samples):
                continue
            for i, shape in enumerate(self._shapes_of(vector, samples, others, per_byte)):
                if shape.bound_s >= self.cutoff_s:
                    break
                # alike pipelines in one order only
                here = (vector, samples, i)
                if before is not None and before[0] == vector and here > before:
                    continue
                if rest:
                    tails = self._choices(tuple(rest), others, per_byte, left - samples, here)
                    yield from ((shape, *tail) for tail in tails)
                else:
                    yield (shape,)

    def _others_can(self, rest: list[Vector], samples: int) -> bool:
        together = tuple(map(sum, zip(*rest, strict=True)))
        return samples * self.space.least_pace(together) < self.cutoff_s

    def _shapes_of(self, vector: Vector, samples: int, others: int, per_byte: float) -> list[Shape]:
        key = (vector, samples, others, per_byte)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self.space.shapes(vector, samples, self.cutoff_s, others, per_byte)
        return found

    def _least_per_byte(self, packing: tuple[Vector, ...]) -> float:
        """Least seconds a byte of any link that a ring over all pipelines may consist of."""
        nodes = [self._nodes(vector) for vector in packing]
        split = any(a.isdisjoint(b) for a, b in combinations(nodes, 2))
        names = sorted(set().union(*nodes))
        fleet = self.request.fleet
        inter = [fleet.link(a, b).least_per_byte for a, b in combinations(names, 2)]
        if split:
            return min(inter)
        intra = [fleet.link(a, a).least_per_byte for a in names if fleet.node(a).gpus > 1]
        return min([*inter, *intra], default=0.0)

    def _nodes(self, vector: Vector) -> set[str]:
        """Nodes that a pipeline may touch."""
        return {node.name for p, n in enumerate(vector) if n for node in self.pools[p].nodes}

    def _try(self, shapes: tuple[Shape, ...]) -> None:
        """Price a whole plan, and keep it where it is the best so far.

        First with every link to itself: reductions depend on cuts and devices only, and no stage is done
        earlier in the plan than alone, so this is a lower bound.
        """
        if self._end(shapes) >= self.cutoff_s:
            return
        plan = self._plan(shapes)
        self.priced += 1
        found = price(plan, self.request)
        assert isinstance(found, Estimate), found
        if found.iteration_s < self.cutoff_s:
            self.best = plan, found
            self.cutoff_s = found.iteration_s

    def _end(self, shapes: tuple[Shape, ...]) -> Seconds:
        """When these pipelines are through if each stage is done as early as alone."""
        key = tuple(
            tuple((start, stop, tuple(sorted(p for p, _ in line))) for start, stop, _, line in shape.stages)
            for shape in shapes
        )
        tail = self._tails.get(key)
        if tail is None:
            tail = self._tails[key] = self._tail(self._plan(shapes))
        free = {(p, s): at for p, shape in enumerate(shapes) for s, at in enumerate(shape.ready_s)}
        for members, seconds in tail.reductions:
            end = max(free[m] for m in members) + seconds
            free.update(dict.fromkeys(members, end))
        return max(free.values()) + tail.after_s

    def _tail(self, plan: Plan) -> _Tail:
        tables = self.request.tables
        seats = seats_of(plan, tables)
        reductions = [
            (tuple(dict.fromkeys((p, s) for p, s, _ in r.members)), r.seconds)
            for r in reductions_of(plan, seats, tables)
        ]
        updates = [
            tables.update_seconds(*stage.layers, seat.node.device.name, 1)
            for pipeline, rows in zip(plan.pipelines, seats, strict=True)
            for stage, row in zip(pipeline.stages, rows, strict=True)
            for seat in row
        ]
        return _Tail(reductions, commit_seconds(seats, tables) + max(updates) + tables.profile.step_s)

    def _plan(self, shapes: tuple[Shape, ...]) -> Plan:
        used = [0] * len(self.pools)
        return Plan(
            model=self.request.model.name,
            global_batch=self.request.global_batch,
            sequence=self.request.model.sequence,
            schedule=self.space.kind,
            pipelines=tuple(shape.pipeline(self.pools, used) for shape in shapes),
        )
