"""The planner against the proven optimum of random small problems: same price, or what it loses.

``python -m bench.oracle``; ask for a failing seed again with ``random_request`` of ``planner.exhaustive``.
Two families: one device a replica, and replicas of 1, 2 or 4 devices of a node (tensor parallelism).
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError
from bench.report import EQUAL, Options, Result, at_least, at_most, run_bench
from planner.exhaustive import Best, Limits, NotProvenError, random_request, solve
from planner.request import Request
from planner.search import find_plan

PLANNER_BUDGET_S = 120.0
"""CPU time, since wall time on a busy machine would end the search before its moves do."""

BENCH_S = 1800.0
"""CPU seconds of the whole: 15 minutes on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Random problems of one kind, and what the planner has to reach on them."""

    name: str
    limits: Limits
    problems: int
    equal: float
    """Least part of the problems in which the planner finds a plan of the best price."""
    worst: float
    """Most that it may lose in any, as a part of the best price."""
    oracle_s: float
    """CPU seconds within which the oracle has to prove the best plan of each."""
    planner_s: float
    """CPU seconds within which the planner has to answer."""
    features: tuple[str, ...]
    """Each is in at least a twentieth of the problems."""


COMMON = ("idle devices", "several pipelines", "several stages", "recomputation")
ONE_DEVICE = Family(
    name="oracle",
    limits=Limits(),
    problems=240,
    equal=1.0,
    worst=EQUAL,
    oracle_s=10.0,
    planner_s=10.0,
    features=("memory binds", *COMMON),
)
TENSOR_PARALLEL = Family(
    name="oracle-tp",
    limits=Limits(devices=8, tp=(1, 2, 4)),
    problems=500,
    equal=0.95,
    worst=0.01,
    oracle_s=120.0,
    planner_s=120.0,
    features=("tensor parallelism", *COMMON),
)
FULL = (ONE_DEVICE, TENSOR_PARALLEL)
QUICK = (
    replace(ONE_DEVICE, limits=Limits(devices=5, blocks=5, global_batch=12), problems=40),
    replace(TENSOR_PARALLEL, limits=Limits(devices=6, blocks=5, global_batch=12, tp=(1, 2, 4)), problems=40),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One problem, solved by both."""

    seed: int
    proven: bool
    oracle_s: float
    planner_s: float
    ratio: float
    """Planner's price over the optimum; 1 where neither finds a plan, inf where only the oracle does, NaN
    where the optimum is not known."""
    features: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return abs(self.ratio - 1) <= EQUAL


def compare(family: Family, seed: int) -> Outcome:
    request = random_request(seed, family.limits)
    start = time.process_time()
    try:
        best, proven = solve(request, limit_s=family.oracle_s), True
    except NotProvenError:
        best, proven = None, False
    middle = time.process_time()
    planned_s = _planned(request)
    end = time.process_time()
    least = best.estimate.iteration_s if best else inf
    ratio = 1.0 if planned_s == least else planned_s / least
    return Outcome(
        seed=seed,
        proven=proven,
        oracle_s=middle - start,
        planner_s=end - middle,
        ratio=ratio if proven else float("nan"),
        features=tuple(_features(family, request, best)) if proven else (),
    )


def _planned(request: Request) -> float:
    try:
        found = find_plan(request, time_budget_s=PLANNER_BUDGET_S, clock=time.process_time)
        return found.estimate.iteration_s
    except NoFeasiblePlanError:
        return inf


def _features(family: Family, request: Request, best: Best | None) -> Iterator[str]:
    """What makes a problem more than trivial."""
    if "memory binds" in family.features and _memory_binds(request, best):
        yield "memory binds"
    if best is None:
        yield "no plan fits"
        return
    stages = [s for p in best.plan.pipelines for s in p.stages]
    if len(best.plan.devices) < len(request.cluster.devices):
        yield "idle devices"
    if len(best.plan.pipelines) > 1:
        yield "several pipelines"
    if len(stages) > len(best.plan.pipelines):
        yield "several stages"
    if any(len(set(s.shares)) > 1 for s in stages):
        yield "unequal shares"
    if any(len(s.replicas) > 1 for s in stages):
        yield "wide stages"
    if any(s.recompute for s in stages):
        yield "recomputation"
    if any(len(r.devices) > 1 for s in stages for r in s.replicas):
        yield "tensor parallelism"


def _memory_binds(request: Request, best: Best | None) -> bool:
    """Whether more memory would make a faster plan."""
    entries = [msgspec.structs.replace(e, memory_GiB=1e6) for e in request.cluster.node]
    cluster = msgspec.structs.replace(request.cluster, node=tuple(entries))
    roomy = solve(replace(request, cluster=cluster))
    assert roomy is not None
    return best is None or roomy.estimate.iteration_s < best.estimate.iteration_s * (1 - EQUAL)


def measure(options: Options) -> Iterator[Result]:
    start, cpu_s = time.perf_counter(), 0.0
    results: list[Result] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as processes:
        for family in QUICK if options.quick else FULL:
            outcomes = []
            count = family.problems
            for outcome in processes.map(compare, [family] * count, range(count)):
                outcomes.append(outcome)
                _tell(family, outcome)
            cpu_s += sum(o.oracle_s + o.planner_s for o in outcomes)
            results += judged(family, outcomes)
    print(f"all of it took {time.perf_counter() - start:.0f} s on {os.cpu_count()} cores")
    yield from results
    yield at_most("oracle-time", cpu_s, "s CPU for all problems", BENCH_S)


def _tell(family: Family, outcome: Outcome) -> None:
    name = f"{family.name}, seed {outcome.seed}"
    if not outcome.proven:
        print(f"{name}: best plan not proven in {family.oracle_s:g} s of CPU time", flush=True)
    elif not outcome.equal:
        print(f"{name}: planner at {outcome.ratio:.9f} of the optimum", flush=True)


def judged(family: Family, outcomes: Sequence[Outcome]) -> Iterator[Result]:
    """What a family's problems show; those whose optimum is not proven count as lost."""
    name, total = family.name, len(outcomes)
    known = [o for o in outcomes if o.proven]
    counts: dict[str, int] = {}
    for feature in (feature for outcome in known for feature in outcome.features):
        counts[feature] = counts.get(feature, 0) + 1
    print(f"{name}, {total} problems: " + ", ".join(f"{n} {count}" for n, count in sorted(counts.items())))
    lost = [o.seed for o in known if not o.equal]
    unproven = [o.seed for o in outcomes if not o.proven]
    yield at_most(f"{name}-unproven", len(unproven), "problems", 0, seeds=unproven)
    yield at_least(
        f"{name}-equal", sum(o.equal for o in known) / total, "of problems", family.equal, lost=lost
    )
    yield at_most(
        f"{name}-worst-ratio", max((o.ratio for o in known), default=inf), "of the optimum", 1 + family.worst
    )
    yield at_least(
        f"{name}-least-ratio", min((o.ratio for o in known), default=0.0), "of the optimum", 1 - EQUAL
    )
    yield at_most(f"{name}-worst-time", max(o.oracle_s for o in outcomes), "s CPU", family.oracle_s)
    yield at_most(f"{name}-planner-worst-time", max(o.planner_s for o in outcomes), "s CPU", family.planner_s)
    for feature in family.features:
        share = counts.get(feature, 0) / total
        named = f"{name}-share-{feature.replace(' ', '-')}"
        yield at_least(named, share, "of problems", 0.05, counts=counts)


if __name__ == "__main__":
    raise SystemExit(run_bench("oracle", measure))
