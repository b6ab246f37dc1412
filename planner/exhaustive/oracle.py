"""Best of all plans of a small problem under the event-simulated price.

The space: any devices may stay idle; the others form any pipelines of any stages of any replicas in any
order, each one device or a tensor-parallel group inside a node at a measured degree (no ZeRO); any cuts;
recomputation by stage; any micro-batch up to the request's largest and any share of it; any numbers of
micro-batches that add up to the global batch; each schedule of the request. ``exhaustive.pipelines`` says
what is left out and proves that it cannot be better.
"""

import time
from dataclasses import dataclass
from math import inf

from arachne_runtime.errors import ArachneError, UsageError
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from ..cost import Estimate
from ..request import Objective, Request
from .combine import Run

MOST_DEVICES = 8
MOST_BLOCKS = 6
MOST_BATCH = 16
MOST_MICRO_BATCH = 4
SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)
"""Those that the bounds are proven for."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best plan, its price and what it took to know."""

    plan: Plan
    estimate: Estimate
    pipelines: int
    """Pipelines that were played."""
    plans: int
    """Plans that were priced."""


class NotProvenError(ArachneError, TimeoutError):
    """The time was over before it was known which plan is best."""


def best_plan(request: Request) -> Plan | None:
    """The plan of least price, or None where no plan fits. UsageError for a problem that is too large."""
    found = solve(request)
    return found.plan if found else None


def solve(request: Request, *, limit_s: Seconds = inf) -> Best | None:
    """As ``best_plan``, with the price and the effort; NotProvenError after ``limit_s`` of CPU time."""
    _refuse_large(request)
    _refuse_other_questions(request)
    end_s = time.process_time() + limit_s

    def check() -> None:
        if time.process_time() > end_s:
            raise NotProvenError(f"not known after {limit_s:g} s of CPU time which plan is best; allow more")

    best: tuple[Plan, Estimate] | None = None
    pipelines = plans = 0
    for kind in request.schedules:
        run = Run(request, kind, check)
        best = run.solve(best[1].iteration_s if best else None) or best
        pipelines += run.space.considered
        plans += run.priced
    return Best(*best, pipelines=pipelines, plans=plans) if best else None


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


def _refuse_other_questions(request: Request) -> None:
    unknown = [kind for kind in request.schedules if kind not in SCHEDULES]
    if unknown:
        raise UsageError(f"no bounds are proven for {', '.join(unknown)}; choose from {', '.join(SCHEDULES)}")
    if any(block.experts for block in request.model.blocks):
        raise UsageError("tilings of experts are not tried here; leave blocks with experts out")
    if request.max_zero:
        raise UsageError(f"ZeRO is not tried here; ask with max_zero 0 instead of {request.max_zero}")
    if (
        request.objective is not Objective.THROUGHPUT
        or request.counts_money
        or request.running
        or request.deadline_s
    ):
        raise UsageError("only the fastest plan is proven here; ask without money, deadline and running plan")
