"""``arachne show``: a plan as text; with cluster and model its price, as text, page and trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arachne_runtime.errors import ExitCode, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import read_cluster, read_plan, write_whole
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan

from ..folders import check_writable
from ..inputs import has_no_measurements, model_from, profile_from
from ..options import MODEL_OF_PLAN, AsJson, ProfileOfModel
from ..pricing import request_alone

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner import Request

    from ..report.answers import MisfitAnswer, PriceAnswer


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to show (plan.json).")],
    cluster: Annotated[
        Path | None, typer.Option(help="Show the types of its devices, from cluster.toml.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_OF_PLAN)] = None,
    profile: ProfileOfModel = None,
    grid: Annotated[bool, typer.Option("--grid", help="Show the order of actions in each pipeline.")] = False,
    html: Annotated[Path | None, typer.Option(help="Draw the priced plan on this page.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write its timeline for chrome://tracing or Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> int | None:
    """Show a plan; with its cluster and model also its price."""
    from ..report import answers, tell_show

    check_writable(html, "--html")
    check_writable(trace, "--trace")
    places = read_cluster(cluster) if cluster else None
    spec = model_from(model, read_plan(plan).sequence) if model else None
    found = read_plan(plan, cluster=places, model=spec)
    asking = {"--profile": profile, "--html": html, "--trace": trace}
    request = _request(found, places, model, spec, profile, [o for o, given in asking.items() if given])
    price = misfit = None
    if request is not None:
        price, misfit = _priced(found, request, html, trace)
    answer = tell_show.show_answer(str(plan), found, places, price, misfit)
    print(answers.as_json(answer) if as_json else tell_show.show_text(answer, found, places, grid=grid))
    return ExitCode.NO_FEASIBLE_PLAN if misfit else None


def _request(
    plan: Plan,
    cluster: Cluster | None,
    model: str | None,
    spec: ModelSpec | None,
    profile: str | None,
    asking: list[str],
) -> "Request | None":
    """The problem whose price is told; None without its inputs, unless options are ``asking`` for a price."""
    if cluster is not None and model is not None and spec is not None:
        if asking or not has_no_measurements(model):
            return request_alone(plan, cluster, spec, profile_from(profile, model, spec, cluster))
    elif asking:
        missing = "--cluster" if cluster is None else "--model"
        raise UsageError(f"{asking[0]} prices the plan, which also needs {missing}")
    return None


def _priced(
    plan: Plan, request: "Request", html: Path | None, trace: Path | None
) -> "tuple[PriceAnswer | None, MisfitAnswer | None]":
    """The price, drawn where that is asked for; or why the plan does not fit."""
    from planner.cost import Infeasible, price

    from ..report.answers import misfit_answer, price_answer

    found = price(plan, request)
    if isinstance(found, Infeasible):
        return None, misfit_answer(plan, found, request)
    if html is not None:
        from ..report.page import render_page

        write_whole(html, render_page(plan, found, request).encode())
    if trace is not None:
        from ..report.chrome_trace import chrome_trace

        write_whole(trace, chrome_trace(found.timeline, request.cluster))
    return price_answer(plan, found, request), None
