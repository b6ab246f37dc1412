"""``arachne plan``: the best plan that the search finds, what limits it, and what came next."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arachne_runtime import __version__
from arachne_runtime.errors import NoFeasiblePlanError, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import read_cluster, read_plan, write
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.profile import Profile
from arachne_runtime.units import Seconds, format_seconds

from ..folders import check_writable
from ..goal import Goal, goal_from
from ..inputs import dtype_source, model_from, profile_from
from ..options import MODEL, AsJson

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner import Found, Request
    from planner import Progress as SearchProgress
    from planner.explain import Gain

WHAT_IF_PART = 0.1
"""Of the search's time, for each device type: how long to look for what one more device would give."""

SEARCHED = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE)
"""Schedules that the engine plays, without GPipe: 1F1B takes the same time and less memory."""

SEARCHED_ON_CPUS = (ScheduleKind.ONE_F_ONE_B,)
"""Splitting a backward costs 12, 6 and 1 % of CPU time at widths 128, 256 and 512 (measured 2026-11-30, one
core, 4 blocks, 8 micro-batches of 4 x 64 tokens), which no price knows; and 1F1B alone can be proven best."""

MOST_WHAT_IF_S: Seconds = 0.5
"""No longer than this for each, however long the search."""


def command(
    cluster: Annotated[Path, typer.Option(help="The devices: a cluster.toml.")],
    model: Annotated[str, typer.Option(help=MODEL)],
    global_batch: Annotated[int, typer.Option(help="Samples of a training step; no plan changes it.")],
    running: Annotated[
        Path | None,
        typer.Argument(
            help="The plan now running (plan.json): it is kept where no change pays within an hour."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Measurements that do not lie beside the model.", hidden=True),
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="throughput, cost, or 2e6/24h: samples in time; with @40 (cost@40) at most 40 an hour, "
            "in the cluster file's currency."
        ),
    ] = "throughput",
    out: Annotated[Path | None, typer.Option(help="Write the plan here (plan.json).")] = None,
    time_budget: Annotated[float, typer.Option(help="Seconds that the search may take.")] = 5.0,
    as_json: AsJson = False,
) -> int | None:
    """Find the best plan for a model on a cluster.

    Says what limits it and what came next, and when a change of the running plan pays; exit code 4 where no
    plan fits.
    """
    from planner import find_plan, signed

    from ..report import answers
    from ..report.tell_plan import found_answer, found_text, nothing_answer

    goal = goal_from(objective)
    check_writable(out, "--out")
    if sequence is not None and sequence < 1:
        raise UsageError(f"--sequence {sequence} is below 1")
    places, spec = read_cluster(cluster), model_from(model, sequence)
    _check_sequence(spec, sequence)
    if not 0 < time_budget < inf:
        raise UsageError(f"--time-budget {time_budget:g} is not a number of seconds above 0")
    now = read_plan(running) if running is not None else None
    measured = profile_from(profile, model, spec, places)
    request = _request(places, spec, measured, global_batch, goal, now)
    with _progress_bar() as on_progress:
        try:
            found = find_plan(request, time_budget_s=time_budget, on_progress=on_progress)
        except NoFeasiblePlanError as error:
            if not as_json:
                raise
            print(answers.as_json(nothing_answer(error, request)))
            return error.exit_code
        plan = signed(found, request, version=__version__)
        if out is not None:
            write(plan, out)
        gains = _gains(request, found, time_budget)
    answer = found_answer(
        plan, found, request, gains, file=str(out) if out else None, dtype_source=dtype_source(model)
    )
    print(answers.as_json(answer) if as_json else found_text(answer, plan, places))
    return None


def _request(
    cluster: Cluster,
    model: ModelSpec,
    profile: Profile,
    global_batch: int,
    goal: Goal,
    running: Plan | None,
) -> "Request":
    from planner import Request

    return Request(
        cluster=cluster,
        model=model,
        profile=profile,
        global_batch=global_batch,
        schedules=SEARCHED_ON_CPUS if _has_cpus(cluster) else SEARCHED,
        objective=goal.objective,
        max_price_per_hour=goal.max_price_per_hour,
        deadline_s=goal.deadline_s,
        deadline_samples=goal.deadline_samples,
        running=running,
    )


def _has_cpus(cluster: Cluster) -> bool:
    return any(cluster.device_type(device).startswith("cpu") for device in cluster.devices)


def _gains(request: "Request", found: "Found", time_budget_s: Seconds) -> "tuple[Gain, ...]":
    """What more devices would give, where more throughput is what is asked for."""
    from planner.explain import one_more
    from planner.request import Objective

    if request.objective is not Objective.THROUGHPUT:
        return ()
    budget_s = min(MOST_WHAT_IF_S, WHAT_IF_PART * time_budget_s)
    return one_more(request, found.estimate.samples_per_s, budget_s=budget_s)


def _check_sequence(model: ModelSpec, sequence: int | None) -> None:
    if sequence is not None and sequence != model.sequence:
        raise UsageError(
            f"--sequence {sequence}: the costs of {model.name} are for samples of {model.sequence} tokens; "
            f"measure it at {sequence} with `arachne profile`, or leave --sequence out"
        )


@contextmanager
def _progress_bar() -> "Iterator[Callable[[SearchProgress], None] | None]":
    """A bar on the terminal's error stream, nothing where that is a file or a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    from ..progress import bar

    with bar(Console(stderr=True), transient=True) as shown:
        task = shown.add_task("searching", total=1.0)

        def show(progress: "SearchProgress") -> None:
            if progress.evaluations % 32 == 0:
                best = f"best {format_seconds(progress.best_s)}" if progress.best_s < inf else "no plan yet"
                shown.update(
                    task, completed=progress.part, description=f"{progress.evaluations} plans, {best}"
                )

        yield show
