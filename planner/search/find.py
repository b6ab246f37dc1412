"""The search: proposals, completed exactly, priced, refined; small problems until the best plan is proven."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.plan import MadeBy, Plan, Predicted
from arachne_runtime.units import Seconds

from ..cost import Estimate, price
from ..peers import DEFAULT_BUDGET_S, PEERS
from ..request import Request
from .complete import Completer
from .diagnose import Needs, what_binds
from .exact import Exact, find_pools, num_shapes
from .judge import Judge, Priced, Progress, SearchOverError
from .place import placements
from .propose import Proposal, Proposer
from .refine import Refiner
from .template import Template

MOST_EXACT_DEVICES = 10
MOST_EXACT_COLUMNS = 8_000_000
"""Above this many columns the branch and bound does not come to its end within five seconds of one core."""

MOST_PROPOSALS = 400
"""Proposals that are cut exactly; the ranking's first hundred held the best of them in all trials."""

MOST_PLACED = 48
"""Of these, how many are placed on devices and priced."""

MOST_EXTENDED = 8
"""Of these, how many are tried with other pipelines on what they leave idle."""


@dataclass(frozen=True, slots=True)
class Rival:
    """What a peer strategy proposed."""

    name: str
    plan: Plan | None
    estimate: Estimate | None
    reason: str = ""
    """Why it has no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a search."""

    plan: Plan
    estimate: Estimate
    evaluations: int
    seconds: Seconds
    runners_up: tuple[Priced, ...]
    """The next best plans that were priced, best first."""
    rivals: tuple[Rival, ...]
    proven: bool
    """Whether no plan of the space is faster (TP 1, no ZeRO): branch and bound came to its end."""


def find_plan(
    request: Request,
    *,
    seed: int = 0,
    time_budget_s: Seconds = 5.0,
    evaluations: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Found:
    """The fastest plan under the price that the budget finds, never slower than any peer's proposal.

    With ``evaluations`` the number of priced plans is limited instead of the time, and the same inputs give
    the same plan everywhere. Raises NoFeasiblePlanError, saying what binds, and NotMeasuredError.
    """
    judge = Judge(request, None if evaluations else time_budget_s, evaluations, on_progress)
    rivals = tuple(_rivals(request, judge, time_budget_s if evaluations is None else None))
    proven = False
    with suppress(SearchOverError):
        proven = _search(request, judge, seed)
    if not judge.kept:
        shortage = Needs(request).leanest()
        if judge.not_measured is not None and shortage.over_bytes <= 0:
            raise judge.not_measured
        raise NoFeasiblePlanError(what_binds(request, shortage))
    best, *others = judge.kept
    return Found(
        plan=best.plan,
        estimate=best.estimate,
        evaluations=judge.evaluations,
        seconds=judge.seconds,
        runners_up=tuple(others[:5]),
        rivals=rivals,
        proven=proven,
    )


def _rivals(request: Request, judge: Judge, time_budget_s: Seconds | None) -> Iterator[Rival]:
    """Each peer's proposal; with a time budget the peers together take at most half of it."""
    budget_s = DEFAULT_BUDGET_S if time_budget_s is None else time_budget_s / (2 * len(PEERS))
    for peer in PEERS:
        try:
            plan = peer.propose(request, budget_s=budget_s)
        except NotMeasuredError as error:  # what it would try reaches beyond the profile
            judge.not_measured = error
            yield Rival(peer.name, None, None, str(error))
            continue
        if plan is None:
            yield Rival(peer.name, None, None, "no plan of it fits")
            continue
        judge.keep(plan)
        outcome = price(plan, request)
        assert isinstance(outcome, Estimate)
        yield Rival(peer.name, plan, outcome)


def _search(request: Request, judge: Judge, seed: int) -> bool:
    """Whether the best plan is proven to be the best."""
    small = is_small(request)
    for kind in request.schedules:
        completer = Completer(request, kind)
        for plan in _proposed(request, completer, small):
            judge.price(plan)
        refiner = Refiner(judge, completer, seed)
        starts = [k.plan for k in judge.kept if k.plan.schedule == kind][: 2 if small else 6]
        for plan in starts:
            refiner.climb(plan, 60 if small else 400)
    exact = Exact(request, find_pools(request.cluster), judge.offer, judge.check) if small else None
    if exact is not None and exact.run(judge.best_s):
        return True
    _climb_on(request, judge, seed)
    return False


def is_small(request: Request) -> bool:
    """Whether branch and bound is tried."""
    if len(request.cluster.devices) > MOST_EXACT_DEVICES:
        return False
    batch = request.global_batch
    sizes = range(1, min(batch, request.max_micro_batch or batch) + 1)
    shapes = num_shapes(find_pools(request.cluster).counts, len(request.model.blocks))
    return shapes * sum(batch // size for size in sizes) <= MOST_EXACT_COLUMNS


def _climb_on(request: Request, judge: Judge, seed: int) -> None:
    """Climb from the best plans until none of them gets better or the budget ends."""
    completers = {kind: Completer(request, kind) for kind in request.schedules}
    before = float("inf")
    while judge.best_s < before:
        before = judge.best_s
        for plan in [k.plan for k in judge.kept][:4]:
            Refiner(judge, completers[plan.schedule], seed).climb(plan, 2000)


def _proposed(request: Request, completer: Completer, small: bool) -> Iterator[Plan]:
    """Proposals as plans: the exact cut of many, the best of them on devices, then leftovers filled."""
    proposer = Proposer(request, completer.stage_tables)
    most = MOST_PROPOSALS // 8 if small else MOST_PROPOSALS
    ranked = _ranked(proposer.best(proposer.pools, most), completer, proposer)
    templates = list(dict.fromkeys(p.template for p in ranked))
    for template in templates[:MOST_PLACED]:
        yield from _placed(template, completer)
    for proposal in ranked[:MOST_EXTENDED]:
        for template in proposer.with_leftover(proposal, 2):
            yield from _placed(template, completer)


def _placed(template: Template, completer: Completer) -> Iterator[Plan]:
    for placement in placements(template, completer.request.cluster):
        plan = completer.plan(placement)
        if plan is not None:
            yield plan


def _ranked(proposals: list[Proposal], completer: Completer, proposer: Proposer) -> list[Proposal]:
    """Best first by the closed form of their exact cuts; those that fit nowhere left out."""
    found = []
    for at, proposal in enumerate(proposals):
        line = tuple(
            tuple(proposer.hardware[g.device] for g in stage.groups for _ in range(g.width))
            for stage in proposal.stages
        )
        count = max(1, -(-completer.request.global_batch // (proposal.copies * proposal.micro_batch)))
        cuts = completer.cuts(line, proposal.micro_batch, count)
        if cuts:
            seconds = min(cut.pipeline_s(count) for cut in cuts)
            sync = proposer.sync_s / len(line) if proposal.copies * max(map(len, line)) > 1 else 0.0
            found.append((seconds + sync, at))
    return [proposals[at] for _, at in sorted(found)]


def signed(found: Found, request: Request, *, version: str, seed: int = 0) -> Plan:
    """The plan of a search with what is predicted of it and where it comes from, as it goes into a file.

    ``version`` of this project, ``seed`` of the search.
    """
    estimate = found.estimate
    predicted = Predicted(
        iteration_s=estimate.iteration_s,
        samples_per_s=estimate.samples_per_s,
        peak_bytes=dict(estimate.peak_bytes),
    )
    made_by = MadeBy(
        solver="arachne",
        seed=seed,
        version=version,
        cluster=digest(request.cluster),
        model=digest(request.model),
        profile=digest(request.profile),
        device_types={n: request.cluster.nodes_by_name[n].entry.device for n in _nodes(found.plan)},
    )
    return replace(found.plan, predicted=predicted, made_by=made_by)


def _nodes(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(node_of, plan.devices)))
