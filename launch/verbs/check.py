"""``arachne check``: whether a plan can be run, and if not, everything that is wrong with it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from arachne_runtime.errors import ExitCode, InvalidFileError
from arachne_runtime.plan.files import read_cluster, read_plan
from arachne_runtime.plan.plan import Plan

from ..inputs import model_from


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to check (plan.json).")],
    cluster: Annotated[Path | None, typer.Option(help="Check its devices against this cluster.toml.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Check its blocks: a model.json, or a name of the catalog.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> int | None:
    """List every problem of a plan, each with its address (exit code 3), or say that it is valid."""
    try:
        found = read_plan(
            plan,
            cluster=read_cluster(cluster) if cluster else None,
            model=model_from(model) if model else None,
        )
    except InvalidFileError as error:
        if not as_json:
            raise
        print(json.dumps(_refusal(error), indent=2))
        return ExitCode.INVALID_FILE
    if as_json:
        print(json.dumps({"file": str(plan), "valid": True, "problems": []}, indent=2))
    else:
        print(f"{plan}: valid ({_summary(found)})")
    return None


def _refusal(error: InvalidFileError) -> dict[str, Any]:
    problems = [{"path": problem.path, "message": problem.message} for problem in error.problems]
    return {"file": error.source, "valid": False, "problems": problems}


def _summary(plan: Plan) -> str:
    counts = {
        "pipeline": len(plan.pipelines),
        "stage": sum(len(pipeline.stages) for pipeline in plan.pipelines),
        "device": len(plan.devices),
        "block": plan.num_blocks,
    }
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
