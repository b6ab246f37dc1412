"""How long the coordinator's planner takes to offer a plan for those that are left, in its warm process.

``python -m bench.replanning``. Seconds from the question to the answer, both through pipes, median of five,
on the clock of the wall, of which the search has a budget; beside them the CPU seconds of the process.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from arachne_runtime.plan.cluster import node_of
from bench.planning_time import EVALUATIONS, FOUR, TWO, Case
from bench.report import Options, Result, at_most, run_bench
from launch.coordinator.planner_words import Problem
from launch.coordinator.planning import Planner
from planner.search import find_plan, signed

REPEATS, QUICK_REPEATS = 5, 2
LONGEST_S = {TWO.name: 0.5, FOUR.name: 1.0}
"""What an answer may take on a machine with a core to spare, the search's 0.2 s in it."""
_TICKS_PER_S = 100
"""Of /proc/PID/stat, on Linux."""


def measure(options: Options) -> Iterator[Result]:
    for case in (TWO, FOUR):
        problem = _problem(case)
        with Planner(problem) as planner:
            planner.plan_for(problem.cluster.devices, problem.first)  # it is warm behind this
            yield from _of_losses(case, problem, planner, options)


def _problem(case: Case) -> Problem:
    request = case.request()
    first = signed(find_plan(request, evaluations=EVALUATIONS, peers=()), request, version="bench")
    return Problem(cluster=request.cluster, model=request.model, profile=request.profile, first=first)


def _of_losses(case: Case, problem: Problem, planner: Planner, options: Options) -> Iterator[Result]:
    lost = problem.first.devices[0]
    every = problem.cluster.devices
    for what, left in (
        ("device", tuple(d for d in every if d != lost)),
        ("node", tuple(d for d in every if node_of(d) != node_of(lost))),
    ):
        walls, cpus, rates = [], [], []
        for _ in range(QUICK_REPEATS if options.quick else REPEATS):
            start_s, cpu_s = time.monotonic(), _cpu_seconds(planner._child.pid)
            offer = planner.plan_for(left, problem.first)
            walls.append(time.monotonic() - start_s)
            cpus.append(_cpu_seconds(planner._child.pid) - cpu_s)
            assert offer is not None
            rates.append(offer.samples_per_s)
        name = f"offer-without-a-{what}-{case.name}"
        part = median(rates) / problem.first.predicted.samples_per_s if problem.first.predicted else None
        yield at_most(
            name, median(walls), "s", LONGEST_S[case.name], all_s=walls, cpu_s=cpus, of_first_plan=part
        )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


if __name__ == "__main__":
    raise SystemExit(run_bench("replanning", measure))
