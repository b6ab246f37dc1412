"""``arachne show``: a plan as text; with cluster, model and profile also its price and what limits it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from arachne_runtime.errors import ExitCode, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import encode, read_cluster, read_plan
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.schedule_grid import pipeline_rows, print_grid
from arachne_runtime.plan.text import describe
from arachne_runtime.units import format_bytes, format_seconds, significant

from ..inputs import model_from, profile_from
from ..pricing import price_alone

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner.cost import Estimate, Infeasible


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to show (plan.json).")],
    cluster: Annotated[
        Path | None, typer.Option(help="Show the types of its devices, from cluster.toml.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Its model: a model.json, or a name of the catalog.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Price it with a profile.json, or one of the catalog.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Show the order of actions in each pipeline.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> int | None:
    """Show the structure of a plan; given cluster, model and profile also its price and what limits it."""
    places = read_cluster(cluster) if cluster else None
    spec = model_from(model) if model else None
    found = read_plan(plan, cluster=places, model=spec)
    estimate, misfit = _price(found, places, spec, profile) if profile else (None, None)
    if as_json:
        print(json.dumps(_as_json(plan, found, places, estimate, misfit), indent=2))
    else:
        print(_as_text(found, places, grid, estimate, misfit))
    return ExitCode.NO_FEASIBLE_PLAN if misfit else None


def _price(
    plan: Plan, cluster: Cluster | None, model: ModelSpec | None, profile: str
) -> "tuple[Estimate | None, Infeasible | None]":
    """An estimate, or why the plan does not fit."""
    if cluster is None or model is None:
        missing = "--cluster" if cluster is None else "--model"
        raise UsageError(f"--profile prices the plan, which also needs {missing}")
    from planner.cost import Infeasible

    answer = price_alone(plan, cluster, model, profile_from(profile))
    return (None, answer) if isinstance(answer, Infeasible) else (answer, None)


def _as_text(
    plan: Plan, cluster: Cluster | None, grid: bool, estimate: "Estimate | None", misfit: "Infeasible | None"
) -> str:
    parts = [describe(plan, cluster)]
    if grid:
        parts += [f"pipeline {p}\n{print_grid(pipeline_rows(plan, p))}" for p in range(len(plan.pipelines))]
    if estimate is not None:
        parts.append("\n".join(_estimate_lines(estimate)))
    if misfit is not None:
        parts.append(f"does not fit: {misfit.reason}")
    return "\n\n".join(parts)


def _estimate_lines(estimate: "Estimate") -> list[str]:
    """The price, then for each device its memory and where its seconds go."""
    heads = ("device", "memory", "compute", "bubble", "hop", "sync", "update")
    rows: list[tuple[str, ...]] = [heads]
    for device, parts in estimate.breakdown.items():
        seconds = (parts.compute_s, parts.bubble_s, parts.hop_s, parts.sync_s, parts.update_s)
        memory = format_bytes(estimate.peak_bytes[device])
        rows.append((device, memory, *(format_seconds(value) for value in seconds)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"price: {format_seconds(estimate.iteration_s)} an iteration, "
        f"{significant(estimate.samples_per_s, 4)} samples/s",
        f"  limited by: {estimate.limits}",
        *(f"  not measured: {what}" for what in estimate.not_measured),
        *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]


def _as_json(
    path: Path,
    plan: Plan,
    cluster: Cluster | None,
    estimate: "Estimate | None",
    misfit: "Infeasible | None",
) -> dict[str, Any]:
    answer: dict[str, Any] = {"file": str(path), "plan": json.loads(encode(plan))}
    if cluster is not None:
        answer["device_types"] = {device: cluster.device_type(device) for device in plan.devices}
    if misfit is not None:
        answer["infeasible"] = msgspec.to_builtins(misfit)
    if estimate is not None:
        answer["price"] = {
            "iteration_s": estimate.iteration_s,
            "samples_per_s": estimate.samples_per_s,
            "peak_bytes": dict(estimate.peak_bytes),
            "not_measured": list(estimate.not_measured),
            "limits": estimate.limits,
            "breakdown": {device: msgspec.to_builtins(parts) for device, parts in estimate.breakdown.items()},
        }
    return answer
