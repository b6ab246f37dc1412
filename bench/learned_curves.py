"""The best plan of a source of templates after so many evaluations, and within budgets of CPU time.

An *evaluation* is one distinct primitive shape, completed with every promising number. All sources are
counted, completed, packed and priced alike: they differ in the shapes that they propose, and their order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.plan import Plan
from bench.learned_contestants import Contestant
from bench.learned_records import Timed
from bench.learned_search import searched
from planner.cost import Estimate, price
from planner.request import Request
from planner.search import Source
from planner.search.assemble import alike, part_of, plan_of
from planner.search.broad import MOST_COLUMNS, MOST_PACKED, PACKED_NEAR
from planner.search.columns import Columns, Completion
from planner.search.pack import pack
from planner.search.shapes import Shapes, expanded, shapes_of
from planner.search.supply import Supply

PRICED = 8
"""Best columns that are priced at each mark, and best mixtures."""

MOST_STALE = 12
"""Batches in a row that bring no new shape, after which a source counts as exhausted."""

AT_ONCE = 100
"""Shapes that are completed together."""


@dataclass(slots=True)
class Trial:
    """All columns so far of one source on one request, and the best plan made of them."""

    request: Request
    packed: bool = True
    samples_per_s: float = 0.0
    columns: Columns | None = None
    completion: Completion = field(init=False)
    _priced: set[Plan] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.completion = Completion(self.request, Supply.of(self.request), self.request.schedules[0])

    def add(self, shapes: Shapes) -> None:
        """Complete them, and keep the best columns."""
        for start in range(0, len(shapes), AT_ONCE):
            some = shapes.take(np.arange(start, min(start + AT_ONCE, len(shapes))))
            found = self.completion.columns(expanded(self.completion, some)[0])
            if found is not None and len(found):
                both = found if self.columns is None else Columns.joined([self.columns, found])
                kept = np.argsort(both.seconds, kind="stable")[:MOST_COLUMNS]
                self.columns = both.take(kept)

    def best(self) -> float:
        """Samples a second of the best plan: the best few columns and mixtures are priced."""
        if self.columns is not None:
            for plan in self._plans(self.columns):
                self._price(plan)
        return self.samples_per_s

    def _plans(self, columns: Columns) -> Iterator[Plan | None]:
        for k in range(min(PRICED, len(columns))):
            part = alike(columns, k, self.request.global_batch)
            if part is not None:
                yield plan_of(self.completion, [part], by_stage=bool(columns.by_stage[k]))
        if not self.packed:
            return
        most_s = PACKED_NEAR * float(columns.seconds[0])
        best = columns.take(np.arange(min(MOST_PACKED, len(columns))))
        single, packings = pack(self.completion, best, most_s)
        for packing in packings[:PRICED]:
            parts = [part_of(single, k, takes) for k, takes in packing.columns]
            yield from (plan_of(self.completion, parts, by_stage=by_stage) for by_stage in (False, True))

    def _price(self, plan: Plan | None) -> None:
        if plan is None or plan in self._priced:
            return
        self._priced.add(plan)
        self.samples_per_s = max(self.samples_per_s, priced(plan, self.request))


def distinct(completion: Completion, source: Source, seed: int) -> Iterator[Shapes]:
    """The shapes that a source proposes, in its order, each once; until it brings no new ones."""
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    stale = 0
    for batch in source.batches(completion, seed):
        shapes = shapes_of(batch).distinct()
        fresh = [k for k, row in enumerate(_rows(shapes)) if row not in seen]
        seen.update(_rows(shapes))
        stale = 0 if fresh else stale + 1
        if fresh:
            yield shapes.take(np.array(fresh, np.int64))
        if stale == MOST_STALE:
            return


def _rows(shapes: Shapes) -> list[tuple[tuple[int, int, int], ...]]:
    depths = shapes.depth.tolist()
    table = np.stack([shapes.pool, shapes.tp, shapes.width], axis=2).tolist()
    return [tuple(map(tuple, row[:depth])) for row, depth in zip(table, depths, strict=True)]


def curve(
    request: Request, source: Source, *, seed: int, marks: Sequence[int], packed: bool = True
) -> tuple[float, ...]:
    """Samples a second of the best plan after so many evaluations each; 0 before there is one."""
    trial = Trial(request, packed)
    found: list[float] = []
    done = 0
    for shapes in distinct(trial.completion, source, seed):
        start = 0
        while start < len(shapes) and len(found) < len(marks):
            stop = min(len(shapes), start + marks[len(found)] - done)
            trial.add(shapes.take(np.arange(start, stop)))
            done, start = done + stop - start, stop
            if done == marks[len(found)]:
                found.append(trial.best())
        if len(found) == len(marks):
            break
    last = trial.best()
    return (*found, *[last] * (len(marks) - len(found)))


def priced(plan: Plan, request: Request) -> float:
    """Samples a second; 0 where the plan does not fit, or reaches beyond the profile."""
    try:
        outcome = price(plan, request)
    except NotMeasuredError:
        return 0.0
    return outcome.samples_per_s if isinstance(outcome, Estimate) else 0.0


def timed(request: Request, contestant: Contestant, *, seed: int, budget_s: float) -> Timed:
    """What a contestant finds in a budget of CPU time; ``request`` remembers nothing yet."""
    search = searched(
        request,
        budget_s=budget_s,
        sources=contestant.sources,
        learned=contestant.sources is None,
        seed=seed,
        steps=contestant.steps,
    )
    return Timed(
        contestant=contestant.name,
        seed=seed,
        budget_s=budget_s,
        cpu_s=search.cpu_s,
        samples_per_s=search.samples_per_s,
    )
