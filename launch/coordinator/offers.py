"""The planner's answer to a coordinator's question: both plans priced from the same tables."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from arachne_runtime import __version__
from arachne_runtime.errors import ArachneError, NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds
from planner import Request, find_plan, signed
from planner.cost import Estimate, price
from planner.search.migrate import change_seconds, same_layout, still_there

from .cut import Cut, cut
from .planner_words import Answer, Problem, Question
from .shrink import shrunk
from .worth import Offer, samples_in


class SupersededError(Exception):
    """A newer question is there: the answer to this one is of no use."""


class Offers:
    """Plans for one job."""

    def __init__(self, problem: Problem, is_superseded: Callable[[], bool] = lambda: False) -> None:
        self._problem = problem
        self._is_superseded = is_superseded

    @property
    def first_question(self) -> Question:
        """About the first plan on all devices, so that a later one is answered as soon as any other."""
        problem = self._problem
        return Question(number=0, devices=problem.cluster.devices, running=problem.first)

    def answer(self, question: Question) -> Answer:
        """With an offer, or why no plan fits or can be priced. SupersededError where a newer one came."""
        here = cut(self._problem.cluster, question.devices)
        if not here.names:
            return Answer(number=question.number, no_plan="none of the devices is in the cluster file")
        running = here.there(question.running) if question.running is not None else None
        request = self._request(here, running)
        try:
            offer = self._best(request, here, running)
        except (NoFeasiblePlanError, NotMeasuredError) as error:
            return Answer(number=question.number, no_plan=str(error))
        is_running = running is not None and same_layout(offer.plan, running)
        plan = question.running if is_running and question.running is not None else here.back(offer.plan)
        return Answer(number=question.number, offer=replace(offer, plan=plan))

    def _request(self, here: Cut, running: Plan | None) -> Request:
        problem = self._problem
        return Request(
            cluster=here.cluster,
            model=problem.model,
            profile=problem.profile,
            global_batch=problem.first.global_batch,
            schedules=problem.schedules,
            running=running,
            change_every_s=problem.horizon_s,
            migration_pause_s=problem.pause_s,
        )

    def _best(self, request: Request, here: Cut, running: Plan | None) -> Offer:
        """Of what the search finds and what is left of the running and the first plan."""
        problem = self._problem
        is_whole = running is not None and still_there(running, request)
        found = find_plan(
            request,
            time_budget_s=problem.patient_s if is_whole else problem.hurried_s,
            on_progress=lambda _: self._give_up_where_superseded(),
        )
        now = _priced(running, request) if is_whole and running is not None else 0.0
        offers = [
            Offer(
                plan=plan,
                samples_per_s=rate,
                running_samples_per_s=now,
                migration_s=_migration_s(plan, request),
            )
            for plan, rate in [
                (signed(found, request, version=__version__), found.estimate.samples_per_s),
                *_remains([running, here.there(problem.first)], request),
            ]
        ]
        return max(offers, key=lambda one: samples_in(one, problem.horizon_s))

    def _give_up_where_superseded(self) -> None:
        if self._is_superseded():
            raise SupersededError


def _remains(plans: Sequence[Plan | None], request: Request) -> Iterator[tuple[Plan, float]]:
    """What is left of plans, where that fits and can be priced."""
    there = frozenset(request.cluster.devices)
    for plan in plans:
        left = shrunk(plan, there) if plan is not None else None
        if left is not None and (rate := _priced(left.plan, request)) > 0:
            yield left.plan, rate


def _priced(plan: Plan, request: Request) -> float:
    """Samples a second; 0 where it does not fit or cannot be priced."""
    try:
        estimate = price(plan, request)
    except ArachneError:
        return 0.0
    return estimate.samples_per_s if isinstance(estimate, Estimate) else 0.0


def _migration_s(plan: Plan, request: Request) -> Seconds:
    if request.running is None or same_layout(plan, request.running):
        return 0.0
    return change_seconds(request.running, plan, request)
