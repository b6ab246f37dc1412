"""Our planner and the six published ones on the paper's grid under one price: throughput, seconds, shares.

``python -m bench.planners --out DIR`` keeps every cell in ``DIR/planners/``, so that a run that was
interrupted goes on where it stopped; cells of other planning code are measured again. ``--quick``: four
cells, two seconds each.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from math import exp, log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from msgspec.structs import replace

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.plan import Plan
from bench.grid import Cell, full, quick
from bench.report import Options, Result, at_least, at_most, commit, run_bench
from planner.cost import Estimate, price
from planner.explain import share_of_ideal
from planner.peers import PEERS
from planner.request import Request
from planner.search import find_plan

BUDGET_S, QUICK_BUDGET_S = 20.0, 2.0
NUM_PROCESSES = 2
MOST_STRETCHED_S = 50.0
"""What our search may take on the wall where other programs take the cores.

The peers are given CPU time and our search wall time, so its is stretched by what the cell's peers waited."""
EQUAL = 1e-9
"""Relative difference of two prices that counts as none: another order of the same sums."""

ADD_UP = 1e-6
"""Of an iteration, by which the ideal and the losses may miss it: sums of floats."""

Record = dict[str, Any]
"""What is kept of a cell, as it stands in its file."""


def measured(cell: Cell, budget_s: float, folder: Path | None) -> Record:
    """Everything of one cell, continued from what its file has."""
    file = folder / f"{cell.name}.json" if folder else None
    record = kept_in(file) or {
        "cell": cell.name,
        "group": cell.group,
        "commit": commit(),
        "code": code(),
        "budget_s": budget_s,
    }
    request, larger = cell.request(), cell.larger()
    start, cpu = time.monotonic(), time.thread_time()
    for name in [peer.name for peer in PEERS] + ["ours", "larger"]:
        if name in record:
            continue
        waited = (time.monotonic() - start) / max(time.thread_time() - cpu, 1e-3)
        stretched = max(budget_s, min(budget_s * waited, MOST_STRETCHED_S))
        if name == "ours":
            record[name] = _ours(request, stretched, larger)
        elif name == "larger":
            record[name] = _ours(larger, stretched)
        else:
            record[name] = _peer(name, request, budget_s)
        if file is not None:
            file.write_text(json.dumps(record, indent=1) + "\n")
    return record


def kept_in(file: Path | None) -> Record | None:
    """What a run of this code left in a cell's file."""
    if file is None or not file.exists():
        return None
    record: Record = json.loads(file.read_text())
    return record if record.get("code") == code() else None


@cache
def code() -> str:
    """Digest of all that a cell's figures depend on: a commit that only changes words keeps them."""
    root = Path(__file__).parents[1]
    files = [root / "bench" / name for name in ("grid.py", "planners.py")]
    for folder in ("planner", "arachne_runtime/plan"):
        files += sorted(f for f in (root / folder).rglob("*") if f.suffix in (".py", ".toml", ".json"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _peer(name: str, request: Request, budget_s: float) -> Record:
    strategy = next(peer for peer in PEERS if peer.name == name)
    start = time.thread_time()
    try:
        plan = strategy.propose(request, budget_s=budget_s)
    except NotMeasuredError as error:
        return {"samples_per_s": None, "seconds": time.thread_time() - start, "reason": str(error)}
    seconds = time.thread_time() - start
    if plan is None:
        return {"samples_per_s": None, "seconds": seconds, "reason": "no plan of it fits"}
    return {"samples_per_s": _throughput(plan, request), "seconds": seconds}


def _ours(request: Request, budget_s: float, larger: Request | None = None) -> Record:
    """What our search finds, and what that is worth as a plan of the larger space."""
    start, cpu = time.monotonic(), time.thread_time()
    try:
        found = find_plan(request, time_budget_s=budget_s)
    except (NoFeasiblePlanError, NotMeasuredError) as error:
        return {"samples_per_s": None, "seconds": time.monotonic() - start, "reason": str(error)}
    seconds, cpu_s = time.monotonic() - start, time.thread_time() - cpu
    losses = share_of_ideal(found.plan, request)
    return {
        "samples_per_s": _throughput(found.plan, request),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "evaluations": found.evaluations,
        "same_as": [r.name for r in found.rivals if r.plan == found.plan],
        "schedule": found.plan.schedule,
        "pipelines": len(found.plan.pipelines),
        "idle": len(request.cluster.devices) - len(found.plan.devices),
        "iteration_s": losses.iteration_s,
        "ideal_s": losses.ideal_s,
        "in_larger": _priced(in_halves(found.plan, request), larger) if larger else None,
        "losses_s": {str(loss.kind): loss.seconds for loss in losses.parts},
    }


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell says in the end."""

    record: Record

    @property
    def ours(self) -> float | None:
        """Our samples a second."""
        found: float | None = self.record["ours"]["samples_per_s"]
        return found

    @property
    def best(self) -> tuple[float, str] | None:
        """The best peer's samples a second, and its name."""
        found = [
            (self.record[peer.name]["samples_per_s"], peer.name)
            for peer in PEERS
            if self.record[peer.name]["samples_per_s"] is not None
        ]
        return max(found, default=None)

    @property
    def ratio(self) -> float | None:
        """Ours over the best peer; None where no peer has a plan; 0 where only peers have one."""
        return None if self.best is None else (self.ours or 0.0) / self.best[0]

    @property
    def gain(self) -> float | None:
        """The best of the larger space over our plan, which is in it too, under the same prices."""
        found, plain = self.record["larger"]["samples_per_s"], self.record["ours"].get("in_larger")
        return max(found or 0.0, plain) / plain if plain else None

    @property
    def share(self) -> float:
        """Of the ideal; 0 without a plan."""
        ours = self.record["ours"]
        return ours["ideal_s"] / ours["iteration_s"] if self.ours else 0.0

    @property
    def rest(self) -> dict[str, float]:
        """What takes the rest, as parts of the iteration."""
        ours = self.record["ours"]
        return {kind: s / ours["iteration_s"] for kind, s in ours["losses_s"].items()} if self.ours else {}

    def __str__(self) -> str:
        peers = " ".join(f"{peer.name} {self._figures(peer.name)}" for peer in PEERS)
        lead = f"{self.ratio:.3f} x {self.best[1]}" if self.best and self.ratio else "no peer has a plan"
        rest = ", ".join(f"{kind} {100 * part:.0f} %" for kind, part in self.rest.items() if part >= 0.005)
        gain = f"; larger space {self.gain:.3f} x" if self.gain else ""
        return (
            f"{self.record['cell']}: ours {self._figures('ours')}, {lead}{gain}\n  {peers}\n"
            f"  {100 * self.share:.0f} % of the ideal; {rest}"
        )

    def _figures(self, name: str) -> str:
        found = self.record[name]
        throughput = found["samples_per_s"]
        return f"{throughput:.2f}/s in {found['seconds']:.1f} s" if throughput else "has none"


def measure(options: Options) -> Iterator[Result]:
    cells = list(quick() if options.quick else full())
    budget_s = QUICK_BUDGET_S if options.quick else BUDGET_S
    folder = options.out / "planners" if options.out and not options.quick else None
    if folder is not None:
        folder.mkdir(exist_ok=True)
    outcomes = []
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for record in pool.map(partial(measured, budget_s=budget_s, folder=folder), cells):
            outcomes.append(Outcome(record))
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
        cells={o.record["cell"]: o.ratio for o in outcomes},
    )
    yield at_least(
        "planners-median-ratio", _median(ratios), "times the best peer", 1.0, groups=_groups(outcomes)
    )
    yield at_least(
        "planners-median-gain-of-larger-space",
        _median([o.gain for o in planned if o.gain is not None]),
        "times the plain space",
        1.0,
        cells={o.record["cell"]: o.gain for o in outcomes},
        found={o.record["cell"]: o.record["larger"]["samples_per_s"] for o in outcomes},
    )
    yield at_most(
        "planners-losses-add-up",
        max((abs(o.share + sum(o.rest.values()) - 1) for o in planned), default=1.0),
        "of an iteration",
        ADD_UP,
        share={o.record["cell"]: o.share for o in planned},
        rest={o.record["cell"]: o.rest for o in planned},
        median_share=_median([o.share for o in planned]),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def _groups(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """By group: the least and the geometric mean of our ratios, and the mean share of the ideal."""
    found = {}
    for group in dict.fromkeys(o.record["group"] for o in outcomes):
        here = [o for o in outcomes if o.record["group"] == group]
        ratios = [o.ratio for o in here if o.ratio]
        found[group] = {
            "least_ratio": min(ratios, default=0.0),
            "mean_ratio": exp(fmean(map(log, ratios))) if ratios else 0.0,
            "mean_share": fmean(o.share for o in here),
        }
    return found


if __name__ == "__main__":
    raise SystemExit(run_bench("planners", measure))
