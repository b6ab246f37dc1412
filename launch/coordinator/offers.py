"""The planner's answer to a coordinator's question: both plans priced from the same tables."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from arachne_runtime import __version__
from arachne_runtime.errors import ArachneError, NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.plan import Plan, Replica, Stage
from arachne_runtime.units import Seconds
from planner import Request, find_plan, signed
from planner.cost import Estimate, price
from planner.search.migrate import change_seconds, same_layout, still_there

from .cut import Cut, cut
from .planner_words import Answer, Problem, Question, SupersededError
from .shrink import shrunk
from .slowed import Slowed
from .worth import Offer, samples_in


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
        slowed = Slowed(self._problem.cluster, question.slower)
        here = cut(self._problem.cluster, question.devices, slowed if question.slower else None)
        if not here.names:
            return Answer(number=question.number, no_plan="none of the devices is in the cluster file")
        running = here.there(question.running) if question.running is not None else None
        request = self._request(here, running, slowed)
        try:
            offer = (
                self._begun(request, here) if self._begins(question) else self._best(request, here, running)
            )
        except (NoFeasiblePlanError, NotMeasuredError) as error:
            return Answer(number=question.number, no_plan=str(error))
        told = replace(
            offer,
            plan=self._known(offer.plan, here, question) or here.back(offer.plan),
            compute_s=here.devices_back(computed(offer.plan, request)),
            running_compute_s=here.devices_back(computed(running, request)) if running is not None else {},
        )
        return Answer(number=question.number, offer=told)

    def _begins(self, question: Question) -> bool:
        """Whether the job begins with all devices of the plan that it was given."""
        return question.running is None and set(self._problem.first.devices) <= set(question.devices)

    def _begun(self, request: Request, here: Cut) -> Offer:
        first = here.there(self._problem.first)
        return Offer(plan=first, samples_per_s=_priced(first, request))

    def _known(self, plan: Plan, here: Cut, question: Question) -> Plan | None:
        """The running or the first plan as it is, where a rank sees no difference."""
        known = (one for one in (question.running, self._problem.first) if one is not None)
        return next((one for one in known if same_layout(plan, here.there(one))), None)

    def _request(self, here: Cut, running: Plan | None, slowed: Slowed) -> Request:
        problem = self._problem
        profile = slowed.profile(problem.profile, problem.model) if slowed.slower else problem.profile
        return Request(
            cluster=here.cluster,
            model=problem.model,
            profile=profile,
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


def computed(plan: Plan, request: Request) -> dict[str, Seconds]:
    """By device: forwards, backwards and the update of a step; empty where the profile does not reach."""
    if not still_there(plan, request):
        return {}
    found: dict[str, Seconds] = defaultdict(float)
    try:
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                for replica in stage.replicas:
                    seconds = _stage_seconds(pipeline.micro_batches, stage, replica, request)
                    for device in replica.devices:
                        found[device] += seconds
    except NotMeasuredError:
        return {}
    return dict(found)


def _stage_seconds(count: int, stage: Stage, replica: Replica, request: Request) -> Seconds:
    """Of one of its devices; what ZeRO and shared-out experts change of it is not told apart."""
    tables, tp = request.tables, len(replica.devices)
    type_ = request.cluster.device_type(replica.devices[0])
    one = tables.stage_seconds(*stage.layers, type_, tp, replica.share, stage.recompute)
    return count * sum(one) + tables.update_seconds(*stage.layers, type_, tp)


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
