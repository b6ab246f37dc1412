"""``arachne plan``: the fastest plan that the search finds, what limits it, and what came next."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arachne_runtime import __version__
from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import encode, read_cluster, write
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.text import describe
from arachne_runtime.units import format_seconds, significant

from ..inputs import is_file_name, model_from, profile_from

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner import Found
    from planner import Progress as SearchProgress


def command(
    cluster: Annotated[Path, typer.Option(help="The devices: a cluster.toml.")],
    model: Annotated[str, typer.Option(help="A model.json, or a name of the catalog.")],
    global_batch: Annotated[int, typer.Option(help="Samples of a training step; no plan changes it.")],
    profile: Annotated[
        str | None, typer.Option(help="A profile.json, or a name of the catalog (default: the model's).")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sample; must be the model's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here (plan.json).")] = None,
    time_budget: Annotated[float, typer.Option(help="Seconds that the search may take.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Find the fastest plan for a model on the devices of a cluster; exit code 4 where none fits."""
    from planner import Request, find_plan, signed

    places, spec = read_cluster(cluster), model_from(model)
    _check_sequence(spec, sequence)
    if time_budget <= 0:
        raise UsageError(f"--time-budget {time_budget:g} is not above 0 seconds")
    request = Request(
        cluster=places,
        model=spec,
        profile=profile_from(_profile_name(model, profile)),
        global_batch=global_batch,
    )
    with _progress_bar() as on_progress:
        found = find_plan(request, time_budget_s=time_budget, on_progress=on_progress)
    plan = signed(found, request, version=__version__)
    if out is not None:
        write(plan, out)
    if as_json:
        print(json.dumps(_as_json(plan, found, out), indent=2))
    else:
        print(_as_text(plan, found, places, out))


def _check_sequence(model: ModelSpec, sequence: int | None) -> None:
    if sequence is not None and sequence != model.sequence:
        raise UsageError(
            f"--sequence {sequence}: the costs of {model.name} are for samples of {model.sequence} tokens; "
            f"measure it at {sequence} with `arachne profile`, or leave --sequence out"
        )


def _profile_name(model: str, profile: str | None) -> str:
    if profile is None and is_file_name(model):
        raise UsageError(f"--model {model} is a file, so --profile must say where its measurements are")
    return model if profile is None else profile


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


def _as_text(plan: Plan, found: "Found", cluster: Cluster, out: Path | None) -> str:
    estimate = found.estimate
    lines = [
        describe(plan, cluster),
        "",
        f"price: {format_seconds(estimate.iteration_s)} an iteration, "
        f"{significant(estimate.samples_per_s, 4)} samples/s",
        f"  limited by: {estimate.limits}",
        *(f"  not measured: {what}" for what in estimate.not_measured),
        f"search: {found.evaluations} plans priced in {format_seconds(found.seconds)}; {_verdict(found)}",
    ]
    rivals = [(r.name, r.estimate.iteration_s) for r in found.rivals if r.estimate]
    lines += _table("rivals", rivals, estimate.iteration_s)
    lines += [f"  {r.name}: {r.reason}" for r in found.rivals if r.reason]
    runners: dict[str, float] = {}
    for runner in found.runners_up:  # from the fastest on
        runners.setdefault(_summary(runner.plan), runner.estimate.iteration_s)
    title = "runners-up (micro-batches x samples, replicas of each stage)"
    lines += _table(title, list(runners.items()), estimate.iteration_s)
    if out is not None:
        lines.append(f"written to {out}")
    return "\n".join(lines)


def _verdict(found: "Found") -> str:
    return (
        "no plan is faster (proven)" if found.proven else "a faster plan is not ruled out: see --time-budget"
    )


def _table(title: str, rows: list[tuple[str, float]], best_s: float) -> list[str]:
    if not rows:
        return [f"{title}: none"]
    width = max(len(name) for name, _ in rows)
    return [f"{title}:"] + [
        f"  {name:<{width}}  {format_seconds(s):>8}  {s / best_s:.3f}x" for name, s in rows
    ]


def _summary(plan: Plan) -> str:
    """``2 pipelines: 8 x 4 through 3 stages of 2 1 1; ...``, alike ones counted."""
    kinds: dict[str, int] = {}
    for p in plan.pipelines:
        widths = " ".join(str(len(stage.replicas)) for stage in p.stages)
        text = f"{p.micro_batches} x {p.micro_batch} over {widths}"
        kinds[text] = kinds.get(text, 0) + 1
    return ", ".join(f"{n} pipeline{'s' if n > 1 else ''} of {text}" for text, n in kinds.items())


def _as_json(plan: Plan, found: "Found", out: Path | None) -> dict[str, Any]:
    estimate = found.estimate
    return {
        "file": str(out) if out else None,
        "plan": json.loads(encode(plan)),
        "price": {
            "iteration_s": estimate.iteration_s,
            "samples_per_s": estimate.samples_per_s,
            "limits": estimate.limits,
            "not_measured": list(estimate.not_measured),
        },
        "search": {
            "evaluations": found.evaluations,
            "seconds": found.seconds,
            "proven": found.proven,
        },
        "rivals": [
            {
                "name": r.name,
                "iteration_s": r.estimate.iteration_s if r.estimate else None,
                "reason": r.reason,
            }
            for r in found.rivals
        ],
        "runners_up": [
            {"plan": json.loads(encode(p.plan)), "iteration_s": p.estimate.iteration_s}
            for p in found.runners_up
        ],
    }
