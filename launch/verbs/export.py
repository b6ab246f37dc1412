"""``arachne export``: the files with which another framework trains a plan."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import encode, read_plan, write_whole

from ..deepspeed_files import DeepSpeedConfig, DeepSpeedFiles, Partition
from ..options import AsJson


class Framework(StrEnum):
    """What a plan is exported to."""

    DEEPSPEED = "deepspeed"


class Exported(Document, frozen=True, kw_only=True):
    """The answer as JSON: the files and what is in them."""

    files: tuple[str, ...]
    config: DeepSpeedConfig
    partition: Partition


def command(
    framework: Annotated[Framework, typer.Argument(help="What trains it: deepspeed.")],
    plan: Annotated[Path, typer.Argument(help="The plan (plan.json).")],
    out: Annotated[Path, typer.Option(help="Write ds_config.json and partition.json into this folder.")],
    as_json: AsJson = False,
) -> None:
    """Write a plan for DeepSpeed, where it can express it.

    What it cannot (unequal shares, stages or pipelines, experts, ...) is refused, every reason with its
    address; exit code 3.
    """
    found = DeepSpeedFiles.of(read_plan(plan))
    out.mkdir(parents=True, exist_ok=True)
    files = {out / "ds_config.json": encode(found.config), out / "partition.json": encode(found.partition)}
    for path, content in files.items():
        write_whole(path, content)
    if as_json:
        answer = Exported(files=tuple(map(str, files)), config=found.config, partition=found.partition)
        print(encode(answer).decode(), end="")
        return
    stages = len(found.partition.parts) - 1
    print(f"{' and '.join(map(str, files))}: {len(found.partition.ranks)} ranks, {stages} stages")
