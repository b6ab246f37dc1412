"""``arachne simulate``: the price of any plan as things are, or would be; or a trace of devices replayed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arachne_runtime.errors import ExitCode, UsageError
from arachne_runtime.plan.files import read_cluster, read_plan, write_whole
from arachne_runtime.plan.plan import Plan

from ..folders import check_writable
from ..inputs import model_from, profile_from
from ..options import MODEL_OF_PLAN, AsJson, ProfileOfModel
from ..pricing import request_alone

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from launch.report.replay.text import ReplayAnswer
    from launch.simulation.outcome import Replayed
    from planner import Request


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to price, or to begin a trace with (plan.json).")],
    cluster: Annotated[Path, typer.Option(help="The devices: a cluster.toml.")],
    model: Annotated[str, typer.Option(help=MODEL_OF_PLAN)],
    profile: ProfileOfModel = None,
    inter_gbps: Annotated[
        float | None, typer.Option(help="Assume so many 1e9 bytes a second between nodes.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Assume so many microseconds between nodes.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay who is there when: a trace (docs/simulating-traces.md).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Of a trace: write a page (.html) or picture (.png).")
    ] = None,
    as_json: AsJson = False,
) -> int | None:
    """Price any plan, also under another profile or network.

    By a trace of devices that go and come: what would be trained, and what the lost time would go into.
    """
    from planner.explain import with_network

    from ..report import answers
    from ..report.tell_simulation import assumed_network, simulation_answer, simulation_text

    _check_out(trace, out)
    places = read_cluster(cluster)
    spec = model_from(model, read_plan(plan).sequence)
    found = read_plan(plan, cluster=places, model=spec)
    request = request_alone(found, places, spec, profile_from(profile, model, spec, places))
    so = with_network(request, inter_GBps=inter_gbps, latency_us=latency_us)
    if trace is not None:
        _show_replay(_replayed(plan, found, trace, out, so), out, as_json=as_json)
        return None
    price, misfit = answers.price_or_misfit(found, so)
    assumed = assumed_network(inter_gbps, latency_us)
    answer = simulation_answer(str(plan), found, request, assumed, price, misfit)
    print(answers.as_json(answer) if as_json else simulation_text(answer, found, request))
    return ExitCode.NO_FEASIBLE_PLAN if misfit else None


def _check_out(trace: Path | None, out: Path | None) -> None:
    if out is None:
        return
    if trace is None:
        raise UsageError("--out writes what a trace gives: give --trace, or see `arachne show --html`")
    if out.suffix not in (".html", ".png"):
        raise UsageError(f"--out {out} ends neither in .html nor in .png")
    check_writable(out, "--out")


def _replayed(path: Path, plan: Plan, trace: Path, out: Path | None, request: "Request") -> "ReplayAnswer":
    from rich.console import Console

    from ..progress import bar
    from ..report.replay.text import ReplayAnswer
    from ..simulation.reading import read_trace
    from ..simulation.replay import replay

    followed, costs = read_trace(trace, request.cluster)
    with bar(Console(stderr=True), transient=True) as shown, _standard_output_elsewhere():
        task = shown.add_task("planning for every set of devices", total=1.0)
        result = replay(
            followed,
            request,
            costs,
            given=plan,
            on_progress=lambda part: shown.update(task, completed=part),
        )
    return ReplayAnswer(plan=str(path), file=str(trace), out=str(out) if out else None, replayed=result)


@contextmanager
def _standard_output_elsewhere() -> Iterator[None]:
    """What the integer solver says of itself, and cannot be told not to, must not stand in an answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show_replay(answer: "ReplayAnswer", out: Path | None, *, as_json: bool) -> None:
    from ..report import answers
    from ..report.replay.text import replay_text

    if out is not None:
        _write(answer.replayed, out)
    print(answers.as_json(answer) if as_json else replay_text(answer))


def _write(replayed: "Replayed", out: Path) -> None:
    if out.suffix == ".png":
        from ..report.replay.picture import draw_replay

        draw_replay(replayed, out)
        return
    from ..report.replay.page import render_replay

    write_whole(out, render_replay(replayed).encode())
