"""From pipelines to plans: every way to deal the devices, every choice of a pipeline for each part."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from math import inf

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from ..cost import Estimate, price
from ..request import Request
from .ends import End
from .floors import Floors
from .lines import Lines
from .pipelines import Family, Shape, Space
from .pools import Vector, find_pools, packings, symmetries
from .tails import Beside, Tails

GROWTH = 1.2
"""The cutoff starts below any plan and grows by this factor until a plan is below it; of 1.1 to 1.7 the
least CPU time together on twelve slow random problems (10.1 s; 11.7 s with 1.7, 12.3 s with 1.1)."""

ROUNDS = 15
"""Then the cutoff is infinite, which ends the search: 1.2 ** 15 is 15 times the least bound of any plan."""

ALONE = Beside(0, 0.0)

Placed = tuple[Vector, Beside]
"""The devices of a pipeline, and what stands beside it."""


class Run:
    """One schedule of one request."""

    def __init__(self, request: Request, kind: ScheduleKind, check: Callable[[], None]) -> None:
        """``check`` is called often, and raises when the time is over."""
        self.request = request
        self.kind = kind
        self.pools = find_pools(request.cluster)
        self.room = tuple(len(pool.devices) for pool in self.pools)
        self.most = request.most_micro_batch
        self.step_s = request.profile.step_s
        self.lines = Lines(request.tables, self.pools)
        self.check = check
        self.space = Space(self.lines, kind, self.most, check)
        self.best: tuple[Plan, Estimate] | None = None
        self.cutoff_s: Seconds = inf
        self.priced = 0
        self._tails: dict[Beside, Tails] = {}
        self._floors: dict[Beside, Floors] = {}
        self._leasts: dict[Placed, list[Seconds]] = {}
        self._per_byte: dict[tuple[tuple[bool, ...], tuple[bool, ...]], float] = {}
        self._families: dict[tuple[Placed, int], list[Family]] = {}
        self._ends: dict[tuple[int, ...], End] = {}

    def solve(self, below_s: Seconds | None) -> tuple[Plan, Estimate] | None:
        """The best plan below ``below_s``, or None."""
        limit = inf if below_s is None else below_s
        every = sorted(((self.floor(p), p) for p in self._packings()), key=lambda pair: pair[0])
        floor = every[0][0]
        for cutoff in [*(floor * GROWTH**i for i in range(1, ROUNDS)), inf] if floor < limit else []:
            self.cutoff_s = min(cutoff, limit)
            self._families.clear()
            for least, packing in every:
                if least >= self.cutoff_s:
                    break
                for chosen in self._choices(packing):
                    self._expand(chosen)
            if self.best is not None or cutoff >= limit:
                break
        return self.best

    def _packings(self) -> Iterator[tuple[Vector, ...]]:
        orders = symmetries(self.request.cluster, self.pools)
        return (p for p in packings(self.room, orders) if len(p) <= self.request.global_batch)

    def placed(self, packing: tuple[Vector, ...]) -> list[Placed]:
        """Each pipeline's devices with what stands beside it."""
        if len(packing) == 1:
            return [(packing[0], ALONE)]
        found = []
        for i, vector in enumerate(packing):
            others = [self._link_per_byte(vector, other) for j, other in enumerate(packing) if j != i]
            found.append((vector, Beside(len(others), max(others))))
        return found

    def _link_per_byte(self, a: Vector, b: Vector) -> float:
        """Least seconds a byte of any link between devices of two pipelines."""
        key = (tuple(map(bool, a)), tuple(map(bool, b)))
        found = self._per_byte.get(key)
        if found is None:
            firsts = [node_of(pool.devices[0]) for pool, n in zip(self.pools, a, strict=True) if n]
            lasts = [node_of(pool.devices[-1]) for pool, n in zip(self.pools, b, strict=True) if n]
            links = [self.request.fleet.link(*ends) for ends in product(firsts, lasts)]
            found = self._per_byte[key] = min(link.least_per_byte for link in links)
        return found

    def floor(self, packing: tuple[Vector, ...]) -> Seconds:
        """No plan on these devices is faster."""
        total = self.request.global_batch
        if len(packing) == 1:
            return self._floors_of(ALONE).pipeline(packing[0], total) + self.step_s
        rows = [self.leasts(placed) for placed in self.placed(packing)]
        first = max(row[0] for row in rows)
        for cutoff in sorted({s for row in rows for s in row if first <= s < inf}):
            if sum(bisect_right(row, cutoff) for row in rows) >= total:
                return cutoff
        return inf

    def leasts(self, placed: Placed) -> list[Seconds]:
        """Least seconds of a plan with such a pipeline for at least 1, 2, ... samples."""
        vector, beside = placed
        key = (vector, Beside(1, beside.per_byte))
        found = self._leasts.get(key)
        if found is None:
            floors = self._floors_of(beside)
            row = [floors.pipeline(vector, n) + self.step_s for n in range(1, self.request.global_batch)]
            found = self._leasts[key] = list(accumulate(reversed(row), min))[::-1]
        return found

    def _floors_of(self, beside: Beside) -> Floors:
        """Those for one other pipeline hold beside more of them too."""
        one = Beside(min(1, beside.others), beside.per_byte)
        found = self._floors.get(one)
        if found is None:
            batch, tails = self.request.global_batch, self._tails_of(one)
            found = self._floors[one] = Floors(self.lines, self.kind, self.room, tails, batch, self.most)
        return found

    def _tails_of(self, beside: Beside) -> Tails:
        found = self._tails.get(beside)
        if found is None:
            found = self._tails[beside] = Tails(self.lines, beside)
        return found

    def _choices(self, packing: tuple[Vector, ...]) -> Iterator[tuple[Family, ...]]:
        """A family for each pipeline, with the samples of the global batch together."""
        placed = self.placed(packing)
        if len(placed) == 1:
            families = self._families_of(placed[0], self.request.global_batch)
            yield from ((family,) for family in families)
            return
        most = [bisect_left(self.leasts(one), self.cutoff_s) for one in placed]
        yield from self._chosen(placed, most, self.request.global_batch, None)

    def _chosen(
        self, placed: list[Placed], most: list[int], left: int, before: tuple[Vector, int, int] | None
    ) -> Iterator[tuple[Family, ...]]:
        """``most``: samples of each before the cutoff; ``before``: what the pipeline before has chosen."""
        first, *rest = placed
        least = max(1, left - sum(most[1:]))
        for samples in range(least, min(most[0], left - len(rest)) + 1) if min(most) else ():
            for i, family in enumerate(self._families_of(first, samples)):
                if family.bound_s >= self.cutoff_s:
                    break
                here = (first[0], samples, i)
                # alike pipelines in one order only
                if before is None or before[0] != first[0] or here <= before:
                    tails = self._chosen(rest, most[1:], left - samples, here) if rest else iter([()])
                    yield from ((family, *tail) for tail in tails)

    def _families_of(self, placed: Placed, samples: int) -> list[Family]:
        found = self._families.get((placed, samples))
        if found is None:
            vector, beside = placed
            floors, tails = self._floors_of(beside), self._tails_of(beside)
            found = self.space.families(vector, samples, self.cutoff_s, floors, tails)
            self._families[placed, samples] = found
        return found

    def _expand(self, chosen: tuple[Family, ...]) -> None:
        """Try the members of some families."""
        ready = [at for family in chosen for at in family.ready_s]
        self.check()
        early = self.space.early.of([f.parts for f in chosen], max([f.update_s for f in chosen]))
        if early.seconds(ready.copy()) >= self.cutoff_s:
            return
        end = self._end(chosen)
        if end.seconds(ready) >= self.cutoff_s:
            return
        for shapes in product(*(family.shapes for family in chosen)):
            if end.seconds([at for shape in shapes for at in shape.ready_s]) < self.cutoff_s:
                self._try(shapes)

    def _end(self, chosen: tuple[Family, ...]) -> End:
        key = tuple(family.frame for family in chosen)
        found = self._ends.get(key)
        if found is None:
            plan = self._plan(tuple(family.shapes[0] for family in chosen))
            found = self._ends[key] = End.of(plan, self.request.tables)
        return found

    def _try(self, shapes: tuple[Shape, ...]) -> None:
        """Price a whole plan, and keep it where it is the best so far."""
        plan = self._plan(shapes)
        self.priced += 1
        found = price(plan, self.request)
        assert isinstance(found, Estimate), found
        if found.iteration_s < self.cutoff_s:
            self.best = plan, found
            self.cutoff_s = found.iteration_s

    def _plan(self, shapes: tuple[Shape, ...]) -> Plan:
        used = [0] * len(self.pools)
        return Plan(
            model=self.request.model.name,
            global_batch=self.request.global_batch,
            sequence=self.request.model.sequence,
            schedule=self.kind,
            pipelines=tuple(shape.pipeline(self.lines, used) for shape in shapes),
        )
