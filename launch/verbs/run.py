"""``arachne run``: torchrun with a plan."""

from pathlib import Path
from typing import Annotated

import typer

from arachne_runtime.plan.files import read_plan


def command(
    plan: Annotated[Path, typer.Argument(help="The plan (plan.json).")],
    script: Annotated[
        list[str],
        typer.Argument(help="Behind --: train.py ARGS, or -m package.module ARGS.", metavar="-- SCRIPT"),
    ],
    trace: Annotated[Path | None, typer.Option(help="Write each rank's records into this folder.")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Also write each rank's output into this folder.")
    ] = None,
) -> None:
    """Run a training script on every device of a plan, one process a device."""
    read_plan(plan)  # a plan that is wrong is said at once, before torch is loaded
    from ..torchrun import run_plan

    run_plan(plan, script, trace=trace, log_dir=log_dir)
