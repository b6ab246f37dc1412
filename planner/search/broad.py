"""The search over templates, for clusters of any size: propose, complete, price the best, climb, pack."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from ..request import Objective, Request
from .assemble import alike, are_whole, part_of, plan_of
from .batch import Templates
from .columns import Columns, Completion
from .interleave import interleaved
from .judge import Judge
from .moves import Line, lines_of, neighbours
from .pack import pack
from .propose import Source
from .running import Running
from .score import WORST, values_of
from .shapes import possible
from .supply import Supply

Ints = NDArray[np.int64]

MOST_COLUMNS = 2400
"""Best columns that are kept."""

MOST_PACKED = 800
"""Best columns that the packing chooses from."""

PRICED_FIRST, PRICED_EACH = 8, 3
"""Best columns that are priced at the start, and after each round of moves."""

BEAM = 8
"""Columns whose neighbours are completed in a round."""

SKETCHED = 2
"""The same in a sketch, and columns that it prices in a round.

In 0.4 s of CPU plans for the grid of bench.planners had 0.984 of the throughput of the best known ones in the
mean, with 3 of each 0.981, with 8 and 3 0.975, without a sketch 0.975 (2026-11-30, busy machine)."""

MOST_TAKEN_OVER = 600
"""Best templates of one schedule that another one starts from."""

MOST_ROUNDS = 40
"""Of moves, in one climb; a guess."""

LONG_PATIENCE = 12
"""Rounds without anything better after which a search with time left gives up; a guess."""

PACKING_S: Seconds = 0.1
"""A packing takes up to so long on one core, and looks at no clock.

0.07 to 0.09 s for two types to four, 64 to 4096 devices: the cases of bench/planning_time.py."""

BATCH_S: Seconds = 0.06
"""A batch for 512 devices of four types is made and completed in up to so long on one core.

0.02 to 0.06 s for those of bench/planning_time.py; only the enumeration's second, which ranks all that it
proposes later, takes 0.13 s."""

PACKED_NEAR = 1.1
"""Mixtures are looked for up to this part of the best template's time: their reductions are priced high."""

NEAR = 1.02
"""A column whose closed form is above the best one by more is not priced: the form errs by 1 % usually."""


class Broad:
    """Templates of one request under one schedule, with the judge that prices their plans.

    ``runs``: of blocks, in each stage's devices (interleaved).
    """

    def __init__(
        self,
        judge: Judge,
        supply: Supply,
        kind: ScheduleKind,
        sources: Sequence[Source],
        *,
        seed: int = 0,
        runs: int = 1,
    ) -> None:
        self.judge = judge
        self.seed = seed
        self.request: Request = judge.request
        self.supply = supply
        self.sources = sources
        self.completion = Completion(self.request, supply, kind, runs)
        self.experts = any(block.experts for block in self.request.model.blocks)
        self.columns: Columns | None = None
        self._whole = np.empty(0, np.bool_)
        """Of each column, whether its copies can share the global batch and, as far as known, be placed."""
        self._seen: set[Line] = set()
        self._moved_from: set[Line] = set()
        self._moved_aliases: set[float] = set()
        self._priced: set[Line] = set()
        self._aliases: set[float] = set()
        """Closed forms of what was priced: copies of one width are the same plan as one of all widths."""

    def run(self) -> None:
        """All steps; SearchOverError once the budget is spent."""
        self.start()
        self.climb()
        self.pack()

    def sketch(self) -> None:
        """What moves make of the first batch of each source.

        Of all proposals the best is seldom as good, and takes longer to find.
        """
        self._ask(self.sources, turns=len(self.sources))
        self.climb(beam=SKETCHED, priced=SKETCHED)

    def start(self, like: "Broad | None" = None) -> None:
        """Complete what the sources propose, or the best templates of another schedule; price the best."""
        if like is not None and like.columns is not None:
            self.completion.rows = like.completion.rows
            self._add(like.columns.take(like._order()[:MOST_TAKEN_OVER]).templates)
        else:
            self._propose()
        self._price_best(PRICED_FIRST)

    def _propose(self) -> None:
        """The first batch of each source, then the second, and so on.

        Under a clock with prices between, so that there is a plan as soon as can be; and all that is near the
        running plan before anything else: after a small change the best plan is likely there.
        """
        near = [s for s in self.sources if isinstance(s, Running) and self.judge.time_budget_s is not None]
        if near:
            self._ask(near)
            if self.judge.kept:  # else what others propose is likelier to fit
                self.climb()
                self.pack()
        self._ask([source for source in self.sources if source not in near])

    def _ask(self, sources: Sequence[Source], turns: int | None = None) -> None:
        """All batches of these, or the first few, in turns; no new one in the last moment."""
        queue = deque((source.batches(self.completion, self.seed), BATCH_S) for source in sources)
        for _ in itertools.count() if turns is None else range(turns):
            if not queue or (self.judge.kept and self.judge.left_s < queue[0][1]):
                return
            batches, took_s = queue.popleft()
            start_s = self.judge.seconds
            templates = next(batches, None)
            if templates is not None:
                queue.append((batches, max(took_s, self.judge.seconds - start_s)))
                if self._add(templates) and self.judge.time_budget_s is not None:
                    self._price_best(PRICED_EACH)

    def climb(self, patience: int = 1, beam: int = BEAM, priced: int = PRICED_EACH) -> None:
        """Moves from the best columns that were not moved yet, until so many rounds bring nothing better."""
        left = patience
        for _ in range(MOST_ROUNDS):
            if left == 0 or self.columns is None:
                return
            before = self._key(self._order()[0])
            moved = self._beam(beam)
            if not moved:
                return
            self._add(self._fresh(self._moved(moved)))
            self._price_best(priced)
            better = self._key(self._order()[0]) < before * (1 - 1e-6)
            left = patience if better else left - 1

    def _beam(self, most: int) -> list[int]:
        """The best columns that were not moved yet, of those with one closed form the first."""
        values, found = self._values(), list[int]()
        for k in self._order():
            line, alias = self._line(k), float(values[k])
            if line not in self._moved_from and alias not in self._moved_aliases:
                self._moved_from.add(line)
                if np.isfinite(alias):
                    self._moved_aliases.add(alias)
                found.append(int(k))
                if len(found) == most:
                    break
        return found

    def _moved(self, columns: Sequence[int]) -> Iterator[Line]:
        """What one move makes of each of these columns."""
        pools = len(self.supply.pools)
        for k in columns:
            yield from neighbours(self._line(k), self.supply.degrees, pools, experts=self.experts)

    def pack(self) -> None:
        """Mixtures of unlike pipelines, where devices are left over or pools differ; no last-minute ones."""
        if self.columns is None or self.request.objective is Objective.COST:
            return
        if self.judge.left_s < PACKING_S and self.judge.kept:
            return
        order = self._order()[:MOST_PACKED]
        most_s = PACKED_NEAR * float(self.columns.seconds[order[0]])
        single, packings = pack(self.completion, self.columns.take(order), most_s)
        for packing in packings[:PRICED_EACH]:
            parts = [part_of(single, k, takes) for k, takes in packing.columns]
            for by_stage in (False, True):
                self._price(plan_of(self.completion, parts, by_stage=by_stage))

    def _price(self, plan: Plan | None) -> bool:
        """Whether there is one, and it fits."""
        if plan is not None and self.completion.runs > 1:
            plan = interleaved(plan, self.completion.runs, self.request)
        if plan is None:
            return False
        score = self.judge.price(plan)
        if self.request.max_zero and (sharing := _sharing(plan)) != plan:
            score = min(score, self.judge.price(sharing))
        return score != WORST

    def _add(self, templates: Templates) -> int:
        """Complete them, of a time budget as many as should end within it; how many fit."""
        self.judge.check()
        runs = self.completion.runs
        if runs > 1:
            most = self.completion.rows.num_blocks // runs
            templates = templates.take((templates.depth > 1) & (templates.depth <= most))
        number = 0
        while n := self._num_in_time(templates):
            now, templates = templates.take(np.arange(n)), templates.take(np.arange(n, len(templates)))
            with self.judge.completing.timing(int(now.depth.sum())):
                number += self._keep(self.completion.columns(now))
        return number

    def _num_in_time(self, templates: Templates) -> int:
        """How many of the first to complete at once; all of them while there is no plan."""
        if not self.judge.kept or self.judge.time_budget_s is None:
            return len(templates)
        most = self.judge.completing.most(self.judge.left_s)
        return int(np.searchsorted(np.cumsum(templates.depth), most, side="right"))

    def _keep(self, found: Columns | None) -> int:
        """Keep the best of all columns; how many of these there were."""
        if found is None:
            return 0
        if len(found):
            self.columns = found if self.columns is None else Columns.joined([self.columns, found])
            whole = are_whole(found.templates, self.request.global_batch)
            self._whole = np.concatenate([self._whole, whole])
            best = np.sort(self._order()[:MOST_COLUMNS])
            if len(best) < len(self.columns):
                self.columns, self._whole = self.columns.take(best), self._whole[best]
        return len(found)

    def _fresh(self, lines: Iterable[Line]) -> Templates:
        """Those that were not there before and can be built."""
        fresh = [line for line in dict.fromkeys(lines) if line not in self._seen and line[0]]
        self._seen.update(fresh)
        return possible(self.completion, Templates.of(fresh))

    def _order(self) -> Ints:
        """Columns by the request's objective, best first."""
        assert self.columns is not None
        return np.argsort(self._values(), kind="stable")

    def _values(self) -> NDArray[np.float64]:
        """The objective of each column; ``inf`` for those that are not whole: only mixtures can use them."""
        assert self.columns is not None
        values = values_of(self.columns.seconds, self.columns.price_per_hour, self.request)
        return np.where(self._whole, values, np.inf)

    def _key(self, k: int) -> float:
        return float(self._values()[k])

    def _line(self, k: int) -> Line:
        assert self.columns is not None
        return lines_of(self.columns.templates.take(np.array([k])))[0]

    def _price_best(self, number: int) -> None:
        """Price the best columns that were not priced yet; what cannot be placed hides none of the others."""
        if self.columns is None:
            return
        values, order = self._values(), self._order()
        best, left, tried = np.inf, number, 0
        for k in order:
            hopeless = tried >= 4 * number and self.judge.kept
            if left == 0 or hopeless or not np.isfinite(values[k]) or values[k] > NEAR * best:
                return
            tried += 1
            line, alias = self._line(k), float(values[k])
            if line in self._priced or alias in self._aliases:
                best = min(best, alias)
                continue
            self._priced.add(line)
            self._aliases.add(alias)
            self._whole[k] = self._price_column(int(k))
            if self._whole[k]:
                best, left = min(best, alias), left - 1

    def _price_column(self, k: int) -> bool:
        """Whether it makes a plan that fits: placed in the likelier of both ways, or else in the other."""
        assert self.columns is not None
        self.judge.check()
        part = alike(self.columns, k, self.request.global_batch)
        if part is None:
            return False
        first = bool(self.columns.by_stage[k])
        plans = (plan_of(self.completion, [part], by_stage=by_stage) for by_stage in (first, not first))
        return self._price(next((plan for plan in plans if plan is not None), None))


def _sharing(plan: Plan) -> Plan:
    """The plan whose wide stages all use ZeRO-1, which saves optimizer steps too, beside memory."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, zero=1) if stage.zero == 0 and len(stage.replicas) > 1 else stage
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)
