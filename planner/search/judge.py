"""The one place where a search prices plans: counts, remembers, keeps the best, ends the search in time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cost import Estimate, Infeasible, price
from ..request import Objective, Request
from .migrate import same_layout
from .pace import Pace
from .realign import realigned
from .score import WORST, Score, score_of, standing_still
from .tidy import tidy

MOST_KEPT = 16
"""Best plans that are kept for refinement and for the list of runners-up."""

FIRST_PLAN_S: Seconds = 2.0
"""So much longer than its time budget a search goes on while it has no plan: 4,096 devices take 0.2 s."""


class SearchOverError(Exception):
    """The budget is spent; the best plan so far is the answer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands."""

    evaluations: int
    seconds: Seconds
    part: float
    """Of the budget, 0 to 1."""
    best_s: Seconds
    """Iteration of the best plan so far; ``inf`` before there is one."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan and its price."""

    plan: Plan
    estimate: Estimate
    score: Score


@dataclass(slots=True)
class Judge:
    """Prices plans for one search, each once."""

    request: Request
    time_budget_s: Seconds | None
    """None: only evaluations are limited, so that the same inputs give the same plan on any machine."""
    most_evaluations: int | None
    on_progress: Callable[[Progress], None] | None = None
    clock: Callable[[], Seconds] = time.monotonic
    """What the time budget is counted in: the wall's seconds, or those of a thread's CPU time."""
    evaluations: int = 0
    kept: list[Priced] = field(default_factory=list)
    """The best plans, best first."""
    not_measured: NotMeasuredError | None = None
    completing: Pace = field(init=False)
    """Of stages of templates."""
    _price_s: Seconds = 0.0
    """What the last price took."""
    _known: dict[Plan, Score] = field(default_factory=dict)
    _evaluated: int = 0
    """Evaluations of the searches before this one."""
    _started: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self.completing = Pace(self.clock)

    @property
    def best_s(self) -> Seconds:
        """Seconds of the best plan; ``inf`` before there is one."""
        return self.kept[0].estimate.iteration_s if self.kept else float("inf")

    @property
    def limit_s(self) -> Seconds:
        """A plan whose iteration takes this long or longer is no better than the best; ``inf``: unknown."""
        if not self.kept or self.kept[0].score.excess > 0 or self.request.objective is Objective.COST:
            return float("inf")
        return self.kept[0].score.value

    @property
    def seconds(self) -> Seconds:
        """Since the start of the search."""
        return self.clock() - self._started

    @property
    def left_s(self) -> Seconds:
        """Of the time budget; ``inf`` where only evaluations are limited."""
        return float("inf") if self.time_budget_s is None else self.time_budget_s - self.seconds

    def part(self) -> float:
        """Part of the budget that is spent."""
        spent = 0.0
        if self.time_budget_s is not None:
            spent = self.seconds / self.time_budget_s if self.time_budget_s > 0 else 1.0
        if self.most_evaluations is not None:
            done = self.evaluations - self._evaluated
            spent = max(spent, done / max(1, self.most_evaluations))
        return min(1.0, spent)

    def check(self) -> None:
        """SearchOverError once the budget is spent; a time budget without a plan yet is stretched."""
        if self.part() < 1.0:
            return
        if self.time_budget_s is None or self.kept or self.seconds > self.time_budget_s + FIRST_PLAN_S:
            raise SearchOverError

    @contextmanager
    def another(self) -> Iterator[None]:
        """A search of its own with as many evaluations, which knows nothing of the plans kept so far.

        The best of both are kept.
        """
        before, self.kept = self.kept, []
        self._known.clear()
        self._evaluated = self.evaluations
        try:
            yield
        finally:
            found, self.kept = self.kept, before
            for priced in found:
                if all(priced.plan != k.plan for k in before):
                    self._insert(priced)

    def price(self, plan: Plan) -> Score:
        """Score of a plan, WORST where it does not fit.

        SearchOverError once the budget is spent, or what is left is less than the last price took.
        """
        plan = tidy(plan, self.request)
        known = self._known.get(plan)
        if known is not None:
            return known
        self.check()
        if self.kept and self.left_s < self._price_s:
            raise SearchOverError
        start_s = self.clock()
        score = self.keep(plan)
        self._price_s = self.clock() - start_s
        if self.on_progress is not None:
            self.on_progress(Progress(self.evaluations, self.seconds, self.part(), self.best_s))
        return score

    def offer(self, plan: Plan) -> Seconds:
        """Price a plan and return the seconds that a better one must stay below."""
        self.price(plan)
        return self.limit_s

    def keep(self, plan: Plan) -> Score:
        """As ``price``, whatever the budget says."""
        plan = tidy(plan, self.request)
        self.evaluations += 1
        score = WORST
        try:
            outcome = price(plan, self.request)
        except NotMeasuredError as error:
            self.not_measured = error
        else:
            if not isinstance(outcome, Infeasible):
                priced = self._realigned(Priced(plan, outcome, score_of(plan, outcome, self.request)))
                score = priced.score
                self._insert(priced)
        self._known[plan] = score
        return score

    def _realigned(self, priced: Priced) -> Priced:
        """On those of alike devices with which the change from the running plan is cheapest.

        Itself where it would not be the best one even if nothing had to move.
        """
        running = self.request.running
        if running is None or same_layout(priced.plan, running):
            return priced
        least = standing_still(priced.estimate, self.request)
        if self.kept and least >= self.kept[0].score:
            return priced
        plan = realigned(priced.plan, running, self.request)
        if plan is priced.plan:
            return priced
        outcome = price(plan, self.request)
        assert isinstance(outcome, Estimate)
        return Priced(plan, outcome, score_of(plan, outcome, self.request))

    def _insert(self, priced: Priced) -> None:
        at = next((i for i, k in enumerate(self.kept) if priced.score < k.score), len(self.kept))
        self.kept.insert(at, priced)
        del self.kept[MOST_KEPT:]
