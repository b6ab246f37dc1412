"""Our planner and the six published ones on the paper's grid under one price: throughput, seconds, shares.

``python -m bench.planners --out DIR`` keeps every cell in ``DIR/planners/``, so that a run that was
interrupted goes on where it stopped; cells of other planning code are measured again. ``--quick``: four
cells, two seconds each.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from hashlib import sha256
from math import exp, log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

from msgspec.structs import replace

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.plan import Plan
from bench.grid import Cell, full, quick
from bench.planners_records import Figures, Outcome, Planned, Record, Searched, read, write
from bench.report import EQUAL, Options, Result, at_least, at_most, commit, run_bench
from planner.cost import Estimate, price
from planner.explain import share_of_ideal
from planner.peers import PEERS, Strategy
from planner.request import Request
from planner.search import find_plan

BUDGET_S, QUICK_BUDGET_S = 20.0, 2.0
NUM_PROCESSES = 2
MOST_STRETCHED_S = 50.0
"""What our search may take on the wall where other programs take the cores.

The peers are given CPU time and our search wall time, so its is stretched by what the cell's peers waited."""
ADD_UP = 1e-6
"""Of an iteration, by which the ideal and the losses may miss it: sums of floats."""


def measured(cell: Cell, budget_s: float, folder: Path | None) -> Record:
    """Everything of one cell, continued from what its file has."""
    file = folder / f"{cell.name}.json" if folder else None
    record = kept_in(file) or Record(
        cell=cell.name, group=cell.group, commit=commit(), code=code(), budget_s=budget_s
    )
    request, larger = cell.request(), cell.larger()
    start, cpu = time.monotonic(), time.thread_time()

    def stretched() -> float:
        waited = (time.monotonic() - start) / max(time.thread_time() - cpu, 1e-3)
        return max(budget_s, min(budget_s * waited, MOST_STRETCHED_S))

    for peer in PEERS:
        if peer.name not in record.peers:
            record = replace(record, peers={**record.peers, peer.name: _peer(peer, request, budget_s)})
            write(record, file)
    if record.ours is None:
        record = replace(record, ours=_ours(request, stretched(), larger))
        write(record, file)
    if record.larger is None:
        record = replace(record, larger=_ours(larger, stretched()))
        write(record, file)
    return record


def kept_in(file: Path | None) -> Record | None:
    """What a run of this code left in a cell's file."""
    return read(file, code())


@cache
def code() -> str:
    """Digest of all that a cell's figures depend on: a commit that only changes words keeps them."""
    root = Path(__file__).parents[1]
    files = [root / "bench" / name for name in ("grid.py", "planners.py", "planners_records.py")]
    for folder in ("planner", "arachne_runtime/plan"):
        files += sorted(
            f for f in (root / folder).rglob("*") if f.suffix in (".py", ".toml", ".json", ".npz")
        )
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _peer(peer: Strategy, request: Request, budget_s: float) -> Figures:
    start = time.thread_time()
    try:
        plan = peer.propose(request, budget_s=budget_s)
    except NotMeasuredError as error:
        return Figures(samples_per_s=None, seconds=time.thread_time() - start, reason=str(error))
    seconds = time.thread_time() - start
    if plan is None:
        return Figures(samples_per_s=None, seconds=seconds, reason="no plan of it fits")
    return Figures(samples_per_s=_throughput(plan, request), seconds=seconds)


def _ours(request: Request, budget_s: float, larger: Request | None = None) -> Searched:
    """What our search finds, and what that is worth as a plan of the larger space."""
    start, cpu = time.monotonic(), time.thread_time()
    try:
        found = find_plan(request, time_budget_s=budget_s)
    except (NoFeasiblePlanError, NotMeasuredError) as error:
        return Searched(samples_per_s=None, seconds=time.monotonic() - start, reason=str(error))
    seconds, cpu_s = time.monotonic() - start, time.thread_time() - cpu
    losses = share_of_ideal(found.plan, request)
    planned = Planned(
        cpu_s=cpu_s,
        evaluations=found.evaluations,
        same_as=tuple(r.name for r in found.rivals if r.plan == found.plan),
        schedule=found.plan.schedule,
        pipelines=len(found.plan.pipelines),
        idle=len(request.cluster.devices) - len(found.plan.devices),
        iteration_s=losses.iteration_s,
        ideal_s=losses.ideal_s,
        losses_s={str(loss.kind): loss.seconds for loss in losses.parts},
        in_larger=_priced(in_halves(found.plan, request), larger) if larger else None,
    )
    return Searched(samples_per_s=_throughput(found.plan, request), seconds=seconds, planned=planned)


def in_halves(plan: Plan, request: Request) -> Plan:
    """The same plan for a model of half-layer blocks: all but the first and the last block are in two."""
    last = len(request.model.blocks)

    def halved(bound: int) -> int:
        return 2 * last - 2 if bound == last else max(0, 2 * bound - 1)

    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, layers=(halved(stage.layers[0]), halved(stage.layers[1])))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _priced(plan: Plan, request: Request) -> float | None:
    """Samples a second; None where the plan does not fit."""
    outcome = price(plan, request)
    return outcome.samples_per_s if isinstance(outcome, Estimate) else None


def _throughput(plan: Plan, request: Request) -> float:
    outcome = price(plan, request)
    assert isinstance(outcome, Estimate)
    return outcome.samples_per_s


def measure(options: Options) -> Iterator[Result]:
    cells = list(quick() if options.quick else full())
    budget_s = QUICK_BUDGET_S if options.quick else BUDGET_S
    folder = options.out / "planners" if options.out and not options.quick else None
    if folder is not None:
        folder.mkdir(exist_ok=True)
    outcomes = []
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for record in pool.map(partial(measured, budget_s=budget_s, folder=folder), cells):
            outcomes.append(Outcome.of(record))
            print(outcomes[-1], flush=True)
    yield from judged(outcomes)


def judged(outcomes: Sequence[Outcome]) -> Iterator[Result]:
    """What the grid must show."""
    planned = [o for o in outcomes if o.ours is not None]
    ratios = [o.ratio for o in outcomes if o.ratio is not None]
    yield at_least("planners-cells-with-a-plan", len(planned) / len(outcomes), "of cells", 1.0)
    yield at_least(
        "planners-worst-ratio",
        min(ratios, default=0.0),
        "times the best peer",
        1 - EQUAL,
        cells={o.cell: o.ratio for o in outcomes},
    )
    yield at_least(
        "planners-median-ratio", _median(ratios), "times the best peer", 1.0, groups=_groups(outcomes)
    )
    yield at_least(
        "planners-median-gain-of-larger-space",
        _median([o.gain for o in planned if o.gain is not None]),
        "times the plain space",
        1.0,
        cells={o.cell: o.gain for o in outcomes},
        found={o.cell: o.larger.samples_per_s for o in outcomes},
    )
    yield at_most(
        "planners-losses-add-up",
        max((abs(o.found.share + sum(o.found.rest.values()) - 1) for o in planned), default=1.0),
        "of an iteration",
        ADD_UP,
        share={o.cell: o.found.share for o in planned},
        rest={o.cell: o.found.rest for o in planned},
        median_share=_median([o.found.share for o in planned]),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def _groups(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """By group: the least and the geometric mean of our ratios, and the mean share of the ideal."""
    found = {}
    for group in dict.fromkeys(o.group for o in outcomes):
        here = [o for o in outcomes if o.group == group]
        ratios = [o.ratio for o in here if o.ratio]
        found[group] = {
            "least_ratio": min(ratios, default=0.0),
            "mean_ratio": exp(fmean(map(log, ratios))) if ratios else 0.0,
            "mean_share": fmean(o.found.share for o in here),
        }
    return found


if __name__ == "__main__":
    raise SystemExit(run_bench("planners", measure))
