"""Walks a plan: each of its parts with its address."""

import re
from collections.abc import Iterator

from ..plan import Pipeline, Plan, Replica, Stage

_DEVICE = re.compile(r"[^:\s]+:(0|[1-9][0-9]{0,8})")


def pipelines(plan: Plan) -> Iterator[tuple[str, Pipeline]]:
    """Every pipeline with its address."""
    for p, pipeline in enumerate(plan.pipelines):
        yield f"$.pipelines[{p}]", pipeline


def stages(plan: Plan) -> Iterator[tuple[str, Pipeline, Stage]]:
    """Every stage with its address and its pipeline."""
    for path, pipeline in pipelines(plan):
        for s, stage in enumerate(pipeline.stages):
            yield f"{path}.stages[{s}]", pipeline, stage


def replicas(plan: Plan) -> Iterator[tuple[str, Replica]]:
    """Every replica with its address."""
    for path, _, stage in stages(plan):
        for r, replica in enumerate(stage.replicas):
            yield f"{path}.replicas[{r}]", replica


def devices(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every device with its address, as often as it is named."""
    for path, _, stage in stages(plan):
        yield from devices_of(stage, path)


def devices_of(stage: Stage, path: str) -> Iterator[tuple[str, str]]:
    """Every device of the stage at ``path``."""
    for r, replica in enumerate(stage.replicas):
        for d, device in enumerate(replica.devices):
            yield f"{path}.replicas[{r}].devices[{d}]", device


def is_device(name: str) -> bool:
    """Whether a text is written ``node:index``."""
    return _DEVICE.fullmatch(name) is not None


def last_layers(plan: Plan, pipeline: int) -> str:
    """Address of the blocks of a pipeline's last stage."""
    return f"$.pipelines[{pipeline}].stages[{len(plan.pipelines[pipeline].stages) - 1}].layers"
