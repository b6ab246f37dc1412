"""How long planning takes on one core, how much memory, how good the quick plan is, and whether it repeats.

``python -m bench.planning_time``. Seconds are CPU time of one core, median of five. Searches without rivals:
ended by a fixed number of priced plans, so that every run does the same; and within a time budget of CPU
seconds, of a new request and of one whose running plan has lost a node.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from hashlib import sha256
from statistics import median

from msgspec.structs import replace

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry, node_of
from arachne_runtime.plan.files import encode
from bench.report import Options, Result, at_least, at_most, run_bench
from planner import catalog
from planner.request import Request
from planner.search import Found, find_plan, signed

REPEATS, QUICK_REPEATS = 5, 3
HASH_SEEDS, QUICK_HASH_SEEDS = 20, 4
EVALUATIONS, MANY_EVALUATIONS = 24, 400
QUICK_SHARE = 0.99
"""Part of the throughput after ``MANY_EVALUATIONS`` that the quick plan must have."""

INTER_GBPS = 12.5
"""One NIC of 100 Gbit/s a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster of nodes of four, with a model."""

    name: str
    model: str
    nodes: tuple[tuple[str, int], ...]
    """Device type and number of nodes of four."""
    global_batch: int = 1024
    longest_s: float | None = None

    def request(self) -> Request:
        entries = tuple(
            NodeEntry(name=device.lower(), device=device, gpus=4, count=count) for device, count in self.nodes
        )
        return Request(
            cluster=Cluster(node=entries, network=Network(inter_GBps=INTER_GBPS)),
            model=catalog.model(self.model),
            profile=catalog.profile_for(catalog.model(self.model), [device for device, _ in self.nodes]),
            global_batch=self.global_batch,
        )


TWO = Case(name="64-devices-2-types", model="llama-3-8b", nodes=(("A100-40", 8), ("H100", 8)), longest_s=0.5)
FOUR = Case(
    name="512-devices-4-types",
    model="llama-3-8b",
    nodes=(("A100-40", 32), ("A6000", 32), ("H100", 32), ("V100-16", 32)),
    longest_s=2.0,
)
LARGEST = Case(
    name="4096-devices-4-types",
    model="llama-3-8b",
    nodes=(("A100-40", 256), ("A6000", 256), ("H100", 256), ("V100-16", 256)),
    global_batch=4096,
)
MOST_MEMORY_GB = 1.0

BUDGETS_S = ((FOUR, 0.5, 0.1), (LARGEST, 3.0, 0.3))
"""What planning may take of one core, all in all, and until there is some plan."""

REPLAN_S = 0.2
"""What planning again after the loss of a node may take, on 512 devices of four types."""

OVERRUN = 1.1
"""A search looks at its clock between batches: it may end this much behind its budget."""

LONG_S = 10.0
"""CPU seconds of the search that a quick plan is compared with; ``bench.learned`` has 60 s and more cells."""

CLOSE = 0.98
"""Part of the long search's throughput that the worst cell must have."""


def measure(options: Options) -> Iterator[Result]:
    for case in (TWO, FOUR):
        yield from _of_case(case, options)
    for case, budget_s, first_s in BUDGETS_S[: 1 if options.quick else None]:
        yield from _within(case, budget_s, first_s, options)
    yield from _again(options)
    yield _memory()
    yield _repeats(QUICK_HASH_SEEDS if options.quick else HASH_SEEDS)


def _of_case(case: Case, options: Options) -> Iterator[Result]:
    taken, samples_per_s = [], 0.0
    for _ in range(QUICK_REPEATS if options.quick else REPEATS):
        request = case.request()  # a new one: nothing is remembered
        start = time.process_time()
        found = find_plan(request, evaluations=EVALUATIONS, peers=())
        taken.append(time.process_time() - start)
        samples_per_s = found.estimate.samples_per_s
    assert case.longest_s is not None
    yield at_most(f"planning-{case.name}", median(taken), "s CPU", case.longest_s, all_s=taken)
    if not options.quick:
        best = find_plan(case.request(), evaluations=MANY_EVALUATIONS, peers=()).estimate.samples_per_s
        yield at_least(f"quick-plan-{case.name}", samples_per_s / best, "of the long search's", QUICK_SHARE)


def _timed(request: Request, budget_s: float) -> tuple[float, float, Found]:
    """CPU seconds of a search and until its first plan, and what it found."""
    told: list[float] = []
    start = time.thread_time()
    found = find_plan(
        request,
        time_budget_s=budget_s,
        peers=(),
        clock=time.thread_time,
        on_progress=lambda progress: told.append(time.thread_time() - start),
    )
    return time.thread_time() - start, told[0], found


def _within(case: Case, budget_s: float, first_s: float, options: Options) -> Iterator[Result]:
    """A search in as little time as it may take, against a long one."""
    runs = [
        _timed(case.request(), budget_s / OVERRUN) for _ in range(QUICK_REPEATS if options.quick else REPEATS)
    ]
    name = f"in-{budget_s:g}-s-{case.name}"
    yield at_most(
        f"planning-{name}", median(r[0] for r in runs), "s CPU", budget_s, all_s=[r[0] for r in runs]
    )
    yield at_most(f"first-plan-{case.name}", median(r[1] for r in runs), "s CPU", first_s)
    if not options.quick:
        best = _timed(case.request(), LONG_S)[2].estimate.samples_per_s
        part = median(r[2].estimate.samples_per_s for r in runs) / best
        yield at_least(f"plan-{name}", part, f"of {LONG_S:g} s of search", CLOSE)


def _again(options: Options) -> Iterator[Result]:
    """The search after the loss of the first node of the running plan, against a long one."""
    request = _node_by_node(FOUR.request())
    running = signed(find_plan(request, evaluations=EVALUATIONS, peers=()), request, version="bench")
    lost = node_of(running.pipelines[0].stages[0].replicas[0].devices[0])
    left = tuple(entry for entry in request.cluster.node if entry.name != lost)

    def after() -> Request:
        return changed(request, cluster=replace(request.cluster, node=left), running=running)

    runs = [_timed(after(), REPLAN_S / OVERRUN) for _ in range(QUICK_REPEATS if options.quick else REPEATS)]
    seconds = [r[0] for r in runs]
    yield at_most(f"replanning-{FOUR.name}", median(seconds), "s CPU", REPLAN_S, all_s=seconds)
    if not options.quick:
        best = _timed(after(), LONG_S)[2].estimate.samples_per_s
        part = median(r[2].estimate.samples_per_s for r in runs) / best
        yield at_least(f"replanned-{FOUR.name}", part, f"of {LONG_S:g} s of search", CLOSE)


def _node_by_node(request: Request) -> Request:
    """An entry for each node, so that one of them can go."""
    entries = tuple(replace(node.entry, name=node.name, count=1) for node in request.cluster.nodes)
    return changed(request, cluster=replace(request.cluster, node=entries))


def _memory() -> Result:
    text = _in_process("print_peak()", hash_seed=0)
    peak_gb, seconds, devices = (float(word) for word in text.split())
    return at_most(
        f"memory-{LARGEST.name}", peak_gb, "GB", MOST_MEMORY_GB, cpu_s=seconds, devices_used=devices
    )


def _repeats(seeds: int) -> Result:
    plans = {_in_process("print_plan()", hash_seed=seed) for seed in range(seeds)}
    return at_most(f"different-plans-of-{seeds}-processes", len(plans), "plans", 1)


def _in_process(call: str, hash_seed: int) -> str:
    run = subprocess.run(
        [sys.executable, "-c", f"from bench import planning_time; planning_time.{call}"],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


def print_plan() -> None:
    print(
        sha256(encode(find_plan(TWO.request(), seed=1, evaluations=EVALUATIONS, peers=()).plan)).hexdigest()
    )


def print_peak() -> None:
    start = time.process_time()
    found = find_plan(LARGEST.request(), evaluations=EVALUATIONS, peers=())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(peak, time.process_time() - start, len(found.plan.devices))


if __name__ == "__main__":
    raise SystemExit(run_bench("planning_time", measure))
