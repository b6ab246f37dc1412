"""``arachne simulate``: the price of any plan as things are, or would be, against what its file predicts."""

from pathlib import Path
from typing import Annotated

import typer

from arachne_runtime.errors import ExitCode
from arachne_runtime.plan.files import read_cluster, read_plan

from ..inputs import model_from, profile_from
from ..options import MODEL_OF_PLAN, AsJson, ProfileOfModel
from ..pricing import request_alone


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to price (plan.json).")],
    cluster: Annotated[Path, typer.Option(help="The devices: a cluster.toml.")],
    model: Annotated[str, typer.Option(help=MODEL_OF_PLAN)],
    profile: ProfileOfModel = None,
    inter_gbps: Annotated[
        float | None, typer.Option(help="Assume so many 1e9 bytes a second between nodes.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Assume so many microseconds between nodes.")
    ] = None,
    as_json: AsJson = False,
) -> int | None:
    """Price any plan, also under another profile or network."""
    from planner.explain import with_network

    from ..report import answers
    from ..report.tell_simulation import assumed_network, simulation_answer, simulation_text

    places = read_cluster(cluster)
    spec = model_from(model, read_plan(plan).sequence)
    found = read_plan(plan, cluster=places, model=spec)
    request = request_alone(found, places, spec, profile_from(profile, model, spec, places))
    so = with_network(request, inter_GBps=inter_gbps, latency_us=latency_us)
    price, misfit = answers.price_or_misfit(found, so)
    assumed = assumed_network(inter_gbps, latency_us)
    answer = simulation_answer(str(plan), found, request, assumed, price, misfit)
    print(answers.as_json(answer) if as_json else simulation_text(answer, found, request))
    return ExitCode.NO_FEASIBLE_PLAN if misfit else None
