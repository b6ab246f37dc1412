"""``arachne check``: whether a plan can be run, and if not, everything that is wrong with it."""

from pathlib import Path
from typing import Annotated

import typer

from arachne_runtime.errors import ExitCode, InvalidFileError, Problem
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import encode, read_cluster, read_plan
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.runnable import obstacles

from ..inputs import model_from


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to check (plan.json).")],
    cluster: Annotated[Path | None, typer.Option(help="Check its devices against this cluster.toml.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Check its blocks: a model.json, or a name of the catalog.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> int | None:
    """List every problem of a plan, or say that it is valid.

    Each problem comes with its address; exit code 3 where there are any.
    """
    try:
        found = read_plan(
            plan,
            cluster=read_cluster(cluster) if cluster else None,
            model=model_from(model, read_plan(plan).sequence) if model else None,
        )
    except InvalidFileError as error:
        if not as_json:
            raise
        _print(Checked(file=error.source, valid=False, problems=error.problems, obstacles=()))
        return ExitCode.INVALID_FILE
    if as_json:
        _print(Checked(file=str(plan), valid=True, problems=(), obstacles=obstacles(found)))
        return None
    print(f"{plan}: valid ({_summary(found)})")
    for obstacle in obstacles(found):
        print(f"  arachne run cannot run it: {obstacle}")
    return None


class Checked(Document, frozen=True, kw_only=True):
    """The answer as JSON."""

    file: str
    valid: bool
    problems: tuple[Problem, ...]
    obstacles: tuple[str, ...]
    """What this version's engine cannot run of a valid plan."""


def _print(answer: Checked) -> None:
    print(encode(answer).decode(), end="")


def _summary(plan: Plan) -> str:
    counts = {
        "pipeline": len(plan.pipelines),
        "stage": sum(len(pipeline.stages) for pipeline in plan.pipelines),
        "device": len(plan.devices),
        "block": plan.num_blocks,
    }
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
