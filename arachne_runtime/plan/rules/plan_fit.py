"""Rules of a plan against the cluster and the model that it is for."""

from collections.abc import Callable, Iterator

from ...errors import Problem
from ..cluster import Cluster, index_of, node_of
from ..model import ModelSpec
from ..plan import Plan
from ..walk import said
from . import visit


def devices_are_in_the_cluster(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Every device of the plan exists."""
    for path, device in visit.devices(plan):
        if not visit.is_device(device):
            continue
        node = cluster.nodes_by_name.get(node_of(device))
        if node is None:
            known = ", ".join(list(cluster.nodes_by_name)[:8]) + (", ..." if len(cluster.nodes) > 8 else "")
            yield Problem(path, f"the cluster has no node {said(node_of(device))}; its nodes: {known}")
        elif index_of(device) >= node.entry.gpus:
            yield Problem(
                path, f"node {node.name} has {node.entry.gpus} devices, so no index {index_of(device)}"
            )


# --- against a model


def model_is_the_one_planned_for(plan: Plan, model: ModelSpec) -> Iterator[Problem]:
    """The plan was made for this model."""
    if plan.model != model.name:
        yield Problem("$.model", f"is {plan.model!r}, but the model is called {model.name!r}")


def sequence_is_the_models(plan: Plan, model: ModelSpec) -> Iterator[Problem]:
    """The sizes of the model are for this sequence length."""
    if plan.sequence >= 1 and plan.sequence != model.sequence:
        yield Problem("$.sequence", f"is {plan.sequence}, but the model is measured for {model.sequence}")


def pipelines_cover_the_model(plan: Plan, model: ModelSpec) -> Iterator[Problem]:
    """Every pipeline ends with the last block."""
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.stages and pipeline.stages[-1].layers[1] != len(model.blocks):
            stop = pipeline.stages[-1].layers[1]
            yield Problem(
                visit.last_layers(plan, p),
                f"stops at block {stop}, but the model has {len(model.blocks)} blocks",
            )


def experts_exist(plan: Plan, model: ModelSpec) -> Iterator[Problem]:
    """Expert parallelism needs experts, at least one for each of its ranks."""
    for path, _, stage in visit.stages(plan):
        start, stop = stage.layers
        if start >= stop:
            continue
        counts = [block.experts for block in model.blocks[max(start, 0) : max(stop, 0)] if block.experts]
        if max(stage.expert_parallel, stage.expert_tensor) > 1 and not counts:
            yield Problem(
                f"{path}.expert_parallel", f"blocks {start} to {stop - 1} have no experts; leave it out"
            )
        elif counts and stage.expert_parallel > min(counts):
            message = f"is {stage.expert_parallel}, but a block of the stage has {min(counts)} experts"
            yield Problem(f"{path}.expert_parallel", message)


PLAN_CLUSTER_RULES: tuple[Callable[[Plan, Cluster], Iterator[Problem]], ...] = (devices_are_in_the_cluster,)
PLAN_MODEL_RULES: tuple[Callable[[Plan, ModelSpec], Iterator[Problem]], ...] = (
    model_is_the_one_planned_for,
    sequence_is_the_models,
    pipelines_cover_the_model,
    experts_exist,
)
