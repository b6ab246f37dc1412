"""``arachne plan``: the fastest plan that the search finds, what limits it, and what came next."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arachne_runtime import __version__
from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import read_cluster, write
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.units import format_seconds

from ..inputs import model_from, profile_from

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner import Progress as SearchProgress

WHAT_IF_PART = 0.1
MOST_WHAT_IF_S = 0.5
"""Of the search's time, for each device type: how long to look for what one more device would give."""


def command(
    cluster: Annotated[Path, typer.Option(help="The devices: a cluster.toml.")],
    model: Annotated[str, typer.Option(help="A name of the catalog, a model.json, or a config.json.")],
    global_batch: Annotated[int, typer.Option(help="Samples of a training step; no plan changes it.")],
    profile: Annotated[
        str | None, typer.Option(help="A profile.json, or a name of the catalog (default: the model's).")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here (plan.json).")] = None,
    time_budget: Annotated[float, typer.Option(help="Seconds that the search may take.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Find the best plan for a model on a cluster.

    Says what limits it and what came next; exit code 4 where no plan fits.
    """
    from planner import Request, find_plan, signed
    from planner.explain import one_more

    from ..report import answers
    from ..report.tell_plan import found_answer, found_text

    places, spec = read_cluster(cluster), model_from(model, sequence)
    _check_sequence(spec, sequence)
    if time_budget <= 0:
        raise UsageError(f"--time-budget {time_budget:g} is not above 0 seconds")
    request = Request(
        cluster=places,
        model=spec,
        profile=profile_from(profile, model, spec, places),
        global_batch=global_batch,
    )
    with _progress_bar() as on_progress:
        found = find_plan(request, time_budget_s=time_budget, on_progress=on_progress)
        plan = signed(found, request, version=__version__)
        if out is not None:
            write(plan, out)
        gains = one_more(
            request, found.estimate.samples_per_s, budget_s=min(MOST_WHAT_IF_S, WHAT_IF_PART * time_budget)
        )
    answer = found_answer(plan, found, request, gains, str(out) if out else None)
    print(answers.as_json(answer) if as_json else found_text(answer, plan, places))


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
                best = (
                    f"best {format_seconds(progress.best_s)}"
                    if progress.best_s < float("inf")
                    else "no plan yet"
                )
                shown.update(
                    task, completed=progress.part, description=f"{progress.evaluations} plans, {best}"
                )

        yield show
