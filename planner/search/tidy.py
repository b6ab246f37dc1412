"""Plans as a search compares them: no tiling where a cut left no experts, nothing that others predicted."""

from msgspec.structs import replace

from arachne_runtime.plan.model import BlockSpec
from arachne_runtime.plan.plan import Pipeline, Plan, Stage

from ..request import Request


def tidy(plan: Plan, request: Request) -> Plan:
    """The plan as the rules want it, with its layout alone; itself where nothing is to be changed."""
    blocks = request.model.blocks
    if plan.predicted is not None or plan.made_by is not None:
        plan = replace(plan, predicted=None, made_by=None)
    if not any(_idle_tiling(stage, blocks) for p in plan.pipelines for stage in p.stages):
        return plan
    return replace(plan, pipelines=tuple(_tidied(p, blocks) for p in plan.pipelines))


def _tidied(pipeline: Pipeline, blocks: tuple[BlockSpec, ...]) -> Pipeline:
    stages = (
        replace(stage, expert_parallel=1, expert_tensor=1) if _idle_tiling(stage, blocks) else stage
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=tuple(stages))


def _idle_tiling(stage: Stage, blocks: tuple[BlockSpec, ...]) -> bool:
    start, stop = stage.layers
    return stage.expert_parallel * stage.expert_tensor > 1 and not any(b.experts for b in blocks[start:stop])
