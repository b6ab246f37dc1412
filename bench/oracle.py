"""The planner against the proven optimum of random small problems: same price, or what it loses.

``python -m bench.oracle``; ask for a failing seed again with ``random_request`` of ``planner.exhaustive``.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.plan import Plan
from bench.report import Options, Result, at_least, at_most, run_bench
from planner.exhaustive import Best, Limits, random_request, solve
from planner.request import Request
from planner.search import find_plan

PROBLEMS, QUICK_PROBLEMS = 240, 40
QUICK_LIMITS = Limits(devices=5, blocks=5, global_batch=12)
EQUAL = 1e-9
"""Relative difference of two prices that counts as none: another order of the same sums."""

ORACLE_WORST_S = 10.0
PLANNER_WORST_S = 10.0
PLANNER_BUDGET_S = 60.0
"""Wall time, which a busy machine stretches; the search is judged by its CPU time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One problem, solved by both."""

    seed: int
    request: Request
    best: Best | None
    found: Plan | None
    oracle_s: float
    planner_s: float
    ratio: float
    """Planner's price over the optimum; 1 where neither finds a plan, inf where only the oracle does."""
    memory_binds: bool
    """Whether more memory would make a faster plan."""

    @property
    def equal(self) -> bool:
        return abs(self.ratio - 1) <= EQUAL


def compare(seed: int, limits: Limits) -> Outcome:
    request = random_request(seed, limits)
    start = time.process_time()
    best = solve(request)
    middle = time.process_time()
    plan, planned_s = _planned(request)
    end = time.process_time()
    least = best.estimate.iteration_s if best else inf
    ratio = 1.0 if planned_s == least else planned_s / least
    return Outcome(
        seed=seed,
        request=request,
        best=best,
        found=plan,
        oracle_s=middle - start,
        planner_s=end - middle,
        ratio=ratio,
        memory_binds=_roomy(request) < least * (1 - EQUAL),
    )


def _planned(request: Request) -> tuple[Plan | None, float]:
    try:
        found = find_plan(request, time_budget_s=PLANNER_BUDGET_S)
    except NoFeasiblePlanError:
        return None, inf
    return found.plan, found.estimate.iteration_s


def _roomy(request: Request) -> float:
    """The optimum if memory were no limit."""
    entries = [msgspec.structs.replace(e, memory_GiB=1e6) for e in request.cluster.node]
    best = solve(
        Request(
            cluster=msgspec.structs.replace(request.cluster, node=tuple(entries)),
            model=request.model,
            profile=request.profile,
            global_batch=request.global_batch,
            schedules=request.schedules,
            max_micro_batch=request.max_micro_batch,
        )
    )
    assert best is not None
    return best.estimate.iteration_s


def features(outcome: Outcome) -> Iterator[str]:
    """What makes a problem more than trivial."""
    if outcome.memory_binds:
        yield "memory binds"
    if outcome.best is None:
        yield "no plan fits"
        return
    plan = outcome.best.plan
    stages = [s for p in plan.pipelines for s in p.stages]
    if len(plan.devices) < len(outcome.request.cluster.devices):
        yield "idle devices"
    if len(plan.pipelines) > 1:
        yield "several pipelines"
    if len(stages) > len(plan.pipelines):
        yield "several stages"
    if len(set(plan.pipelines[0].stages[0].shares)) > 1 or any(len(set(s.shares)) > 1 for s in stages):
        yield "unequal shares"
    if any(len(s.replicas) > 1 for s in stages):
        yield "wide stages"
    if any(s.recompute for s in stages):
        yield "recomputation"


def measure(options: Options) -> Iterator[Result]:
    limits = QUICK_LIMITS if options.quick else Limits()
    outcomes = []
    for seed in range(QUICK_PROBLEMS if options.quick else PROBLEMS):
        outcomes.append(compare(seed, limits))
        if not outcomes[-1].equal:
            print(f"seed {seed}: planner at {outcomes[-1].ratio:.9f} of the optimum", flush=True)
    counts: dict[str, int] = {}
    for name in (name for outcome in outcomes for name in features(outcome)):
        counts[name] = counts.get(name, 0) + 1
    print(f"{len(outcomes)} problems: " + ", ".join(f"{n} {count}" for n, count in sorted(counts.items())))
    yield from judged(outcomes, counts)


def judged(outcomes: list[Outcome], counts: dict[str, int]) -> Iterator[Result]:
    total = len(outcomes)
    lost = [o.seed for o in outcomes if not o.equal]
    ratios = [o.ratio for o in outcomes]
    yield at_least("oracle-equal", sum(o.equal for o in outcomes) / total, "of problems", 1.0, lost=lost)
    yield at_most("oracle-worst-ratio", max(ratios), "of the optimum", 1 + EQUAL)
    yield at_least("oracle-least-ratio", min(ratios), "of the optimum", 1 - EQUAL)
    yield at_most("oracle-worst-time", max(o.oracle_s for o in outcomes), "s CPU", ORACLE_WORST_S)
    yield at_most("planner-worst-time", max(o.planner_s for o in outcomes), "s CPU", PLANNER_WORST_S)
    for name in ("memory binds", "idle devices", "several pipelines", "several stages", "recomputation"):
        figure = counts.get(name, 0) / total
        yield at_least(f"oracle-share-{name.replace(' ', '-')}", figure, "of problems", 0.05, counts=counts)


if __name__ == "__main__":
    raise SystemExit(run_bench("oracle", measure))
