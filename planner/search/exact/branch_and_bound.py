"""Best plan of a small problem, proven: branch and bound from columns to whole plans, priced by simulation.

Packings of columns are cut off by their bounds; the shares of the rest are enumerated, cut off again, priced.
It proves its answer if it runs to its end; stopped early, it has only found better plans than it was given.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import inf

import numpy as np

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.units import Seconds

from ...cost.actors import seats_of
from ...cost.memory import in_flight
from ...cost.sync import commit_seconds, reductions_of
from ...request import Request
from ..counts import Counts, packings
from ..deal import pack_samples
from .columns import Column, Columns, Shape
from .early import EarlyEnds
from .pools import Pools
from .sheets import Sheet, sheet_of

ROUNDING = 1e-9
"""A bound within this part of the best known time cannot beat it: both are sums of the same figures."""

MOST_LIKELY, MOST_FILLINGS = 40, 4
"""Packings that are priced before all others, and fillings of each."""

MOST_LEAVES = 300_000
"""Packings kept at once, some 100 MB; problems that need more are not proven."""

Offer = Callable[[Plan], Seconds]
"""Prices a plan, keeps it if it is best, and returns the best time known; raises to stop the search."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the last backward, for some shapes: it does not depend on shares."""

    reductions: tuple[tuple[tuple[tuple[int, int], ...], Seconds], ...]
    """In order: the (pipeline, stage) pairs whose replicas all join, and seconds."""
    after_s: Seconds
    """Commit, slowest update and fixed seconds."""
    own_s: tuple[tuple[Seconds, ...], ...]
    """Seconds of all reductions that a replica joins, by pipeline and stage."""

    def end(self, columns: Sequence[Column]) -> Seconds:
        """No plan of these columns ends earlier: every reduction waits for the replica that sets the pace."""
        free = [list(column.ready_s) for column in columns]
        for stages, seconds in self.reductions:
            end = max(free[p][s] for p, s in stages) + seconds
            for p, s in stages:
                free[p][s] = end
        return max(map(max, free)) + self.after_s


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to fill a stage: which pool's device stands where, and its share."""

    pools: tuple[int, ...]
    shares: tuple[int, ...]
    recompute: bool
    slowest_s: Seconds


class Exact:
    """Branch and bound over one request."""

    def __init__(
        self, request: Request, pools: Pools, offer: Offer, check: Callable[[], None] = lambda: None
    ) -> None:
        self.request = request
        self.pools = pools
        self.check = check
        self.columns = Columns(request, pools, check)
        self.early = EarlyEnds(request, pools)
        self.offer = offer
        self.best_s = inf
        self._known: dict[tuple[Counts, ScheduleKind, bool], Sheet] = {}
        self._tails: dict[tuple[Shape, ...], Tail] = {}
        self._choices: dict[tuple[Counts, int, int, int, int, bool], list[Choice]] = {}

    def run(self, best_s: Seconds) -> bool:
        """Offer every plan that may beat ``best_s``; whether it is proven that none was left out."""
        self.best_s = best_s
        for bound, kind, columns in sorted(self._likely(), key=lambda leaf: leaf[0])[:MOST_LIKELY]:
            if self._may_win(bound):
                self._expand(kind, columns, MOST_FILLINGS)
        every = ((bound, kind, c) for kind in self.request.schedules for bound, c in self._leaves(kind))
        leaves = list(islice(every, MOST_LEAVES))
        for bound, kind, columns in sorted(leaves, key=lambda leaf: leaf[0]):
            if not self._may_win(bound):
                break
            self._expand(kind, columns)
        return len(leaves) < MOST_LEAVES

    def _likely(self) -> Iterator[tuple[Seconds, ScheduleKind, tuple[Column, ...]]]:
        """For each packing the columns of least bound: a good plan among them cuts off most of the rest."""
        total = self.request.global_batch
        for kind in self.request.schedules:
            for packing in self._packings():
                lists = self._columns_of(packing, kind)
                best = [{c.samples: c for c in reversed(columns)} for columns in lists]
                rows = [[c[n].bound_s if n in c else inf for n in range(total + 1)] for c in best]
                counts = pack_samples(rows, total)
                if counts is not None:
                    columns = tuple(c[n] for c, n in zip(best, counts, strict=True))
                    yield self._tail(tuple(c.shape for c in columns)).end(columns), kind, columns

    def _packings(self) -> Iterator[tuple[Counts, ...]]:
        for packing in packings(self.pools.counts):
            if len(packing) <= self.request.global_batch and self.pools.canonical(packing):
                yield packing

    def _columns_of(self, packing: Sequence[Counts], kind: ScheduleKind) -> list[list[Column]]:
        """Columns of each vector that may still win beside the others, soonest first; none if no sum may."""
        limit, total = self.best_s * (1 - ROUNDING), self.request.global_batch
        sheets = [self._sheet(vector, kind, len(packing) == 1) for vector in packing]
        bounds = [sheet.bounds(self.columns.beside(packing, i)) for i, sheet in enumerate(sheets)]
        within = [np.flatnonzero(row < limit) for row in bounds]
        if not all(len(row) for row in within):
            return [[] for _ in packing]
        most = [int(sheet.samples[row].max()) for sheet, row in zip(sheets, within, strict=True)]
        lists = []
        for sheet, row, bound, own in zip(sheets, within, bounds, most, strict=True):
            chosen = row[sheet.samples[row] >= total - (sum(most) - own)]
            order = np.lexsort((chosen, sheet.samples[chosen], bound[chosen]))
            lists.append([sheet.column(i) for i in chosen[order].tolist()])
        return lists

    def _sheet(self, vector: Counts, kind: ScheduleKind, alone: bool) -> Sheet:
        """A single one must take the whole global batch."""
        key = vector, kind, alone
        if key not in self._known:
            self._known[key] = sheet_of(self.columns, vector, kind, self.best_s * (1 - ROUNDING), alone=alone)
        return self._known[key]

    def _may_win(self, bound_s: Seconds) -> bool:
        return bound_s < self.best_s * (1 - ROUNDING)

    def _leaves(self, kind: ScheduleKind) -> Iterator[tuple[Seconds, tuple[Column, ...]]]:
        """Every packing of columns that sums to the global batch and may win."""
        for packing in self._packings():
            lists = self._columns_of(packing, kind)
            for columns in self._sums(lists, packing, self.request.global_batch):
                if not self._may_win(self.early.of(columns)):
                    continue
                bound = self._tail(tuple(c.shape for c in columns)).end(columns)
                if self._may_win(bound):
                    yield bound, columns

    def _sums(
        self, columns: Sequence[list[Column]], packing: Sequence[Counts], total: int, least: int = 0
    ) -> Iterator[tuple[Column, ...]]:
        """Every choice of columns with ``total`` samples together; equal vectors in ascending order."""
        self.check()
        if len(columns) == 1:
            yield from ((c,) for c in columns[0][least:] if c.samples == total)
            return
        most = sum(max((c.samples for c in rest), default=0) for rest in columns[1:])
        for at in range(least, len(columns[0])):
            column = columns[0][at]
            left = total - column.samples
            if len(columns) - 1 <= left <= most:
                start = at if packing[1] == packing[0] else 0
                for tail in self._sums(columns[1:], packing[1:], left, start):
                    yield (column, *tail)

    def _tail(self, shapes: tuple[Shape, ...]) -> Tail:
        found = self._tails.get(shapes)
        if found is None:
            found = self._tails[shapes] = self._make_tail(shapes)
        return found

    def _make_tail(self, shapes: tuple[Shape, ...]) -> Tail:
        tables = self.request.tables
        choices = [[self._any_choice(stage) for stage in shape.stages] for shape in shapes]
        plan = self._plan(ScheduleKind.ONE_F_ONE_B, shapes, [(1, 1)] * len(shapes), choices)
        seats = seats_of(plan, tables)
        found = reductions_of(plan, seats, tables)
        reductions = tuple((tuple(dict.fromkeys((p, s) for p, s, _ in r.members)), r.seconds) for r in found)
        updates = [
            tables.update_seconds(*stage.layers, seat.node.device.name, seat.tp)
            for pipeline, row in zip(plan.pipelines, seats, strict=True)
            for stage, seated in zip(pipeline.stages, row, strict=True)
            for seat in seated
        ]
        own = tuple(
            tuple(
                sum(seconds for stages, seconds in reductions if (p, s) in stages)
                for s in range(len(shape.stages))
            )
            for p, shape in enumerate(shapes)
        )
        return Tail(reductions, commit_seconds(seats, tables) + max(updates) + tables.profile.step_s, own)

    def _any_choice(self, stage: Counts) -> Choice:
        pools = tuple(p for p, n in enumerate(stage) for _ in range(n))
        return Choice(pools, (1,) * len(pools), False, 0.0)

    def _expand(self, kind: ScheduleKind, columns: tuple[Column, ...], most: int | None = None) -> None:
        """Price the fillings of these columns that may win, evenest first; ``most`` of them or all."""
        shapes = tuple(c.shape for c in columns)
        tail = self._tail(shapes)
        options = []
        for p, column in enumerate(columns):
            budget = self.best_s * (1 - ROUNDING) - tail.after_s
            for s in range(len(column.shape.stages)):
                options.append(self._fitting(kind, column, s, budget - tail.own_s[p][s]))
        counts = [(c.micro_batches, c.micro_batch) for c in columns]
        for chosen in islice(product(*options), most):
            taken = iter(chosen)
            stages = [[next(taken) for _ in shape.stages] for shape in shapes]
            self.best_s = self.offer(self._plan(kind, shapes, counts, stages))

    def _fitting(self, kind: ScheduleKind, column: Column, s: int, budget_s: Seconds) -> list[Choice]:
        """Ways to fill stage ``s`` that leave a chance, fastest first."""
        stages, bounds = column.shape.stages, column.shape.bounds
        held = in_flight(kind, s, len(stages), column.micro_batches)
        key = stages[s], column.micro_batch, bounds[s], bounds[s + 1], held, len(stages) > 1
        found = self._choices.get(key)
        if found is None:
            found = sorted(self._fillings(*key), key=lambda c: c.slowest_s)
            self._choices[key] = found
        count, besides_s, waits_s = column.micro_batches, column.besides_s[s], column.waits_s[s]
        return [
            choice
            for choice in found
            if besides_s + count * choice.slowest_s < budget_s
            and waits_s + (count - held + 1) * choice.slowest_s < budget_s
        ]

    def _fillings(
        self, stage: Counts, micro_batch: int, start: int, stop: int, held: int, ordered: bool
    ) -> Iterator[Choice]:
        """Every order of the devices, where neighbours see it, with every share; recomputed where it must be.

        Recomputation lengthens a backward and shortens nothing, and the simulation is monotone.
        """
        tables, hardware = self.columns.stage_tables, self.columns.hardware
        labels = tuple(p for p, n in enumerate(stage) for _ in range(n))
        arrangements = sorted(set(_distinct(labels))) if ordered else [labels]
        for pools in arrangements:
            for shares in _shares(micro_batch, len(pools)):
                if not ordered and not _descending(pools, shares):
                    continue
                for recompute in (False, True):
                    slowest = max(
                        float(tables.floor(hardware[p], n, n, held, recompute)[start, stop])
                        for p, n in zip(pools, shares, strict=True)
                    )
                    if slowest < float("inf"):
                        yield Choice(pools, shares, recompute, slowest)
                        break

    def _plan(
        self,
        kind: ScheduleKind,
        shapes: Sequence[Shape],
        counts: Sequence[tuple[int, int]],
        stages: Sequence[Sequence[Choice]],
    ) -> Plan:
        free = [list(pool.seats) for pool in self.pools.pools]
        model = self.request.model
        return Plan(
            model=model.name,
            global_batch=self.request.global_batch,
            sequence=model.sequence,
            schedule=kind,
            pipelines=tuple(
                Pipeline(
                    micro_batches=count,
                    micro_batch=size,
                    stages=tuple(
                        Stage(
                            layers=(shape.bounds[s], shape.bounds[s + 1]),
                            recompute=choice.recompute,
                            replicas=tuple(
                                Replica(devices=free[p].pop(0), share=n)
                                for p, n in zip(choice.pools, choice.shares, strict=True)
                            ),
                        )
                        for s, choice in enumerate(chosen)
                    ),
                )
                for shape, (count, size), chosen in zip(shapes, counts, stages, strict=True)
            ),
        )


def _distinct(labels: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every order of labels of which some are equal, once."""
    if not labels:
        yield ()
    for first in sorted(set(labels)):
        at = labels.index(first)
        for rest in _distinct(labels[:at] + labels[at + 1 :]):
            yield (first, *rest)


def _shares(total: int, width: int) -> Iterator[tuple[int, ...]]:
    """Every ordered sum of ``width`` positive integers."""
    if width == 1:
        yield (total,)
        return
    for first in range(1, total - width + 2):
        for rest in _shares(total - first, width - 1):
            yield (first, *rest)


def _descending(pools: Sequence[int], shares: Sequence[int]) -> bool:
    """Whether alike devices take descending shares: the other orders are the same plan."""
    return all(
        a >= b
        for (p, a), (q, b) in zip(
            zip(pools, shares, strict=True), zip(pools[1:], shares[1:], strict=True), strict=False
        )
        if p == q
    )
