"""What cannot be run exactly is refused before the first step, alike on every rank, with the way out."""

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..backends.environment import refuse_without_deepspeed
from ..errors import InvalidFileError, UnsupportedPlanError, UsageError
from ..model import ModelParts
from ..plan.placement import holding, places
from ..plan.plan import Plan, Stage
from ..plan.rules import check_plan
from ..plan.runnable import refuse_unrunnable
from ..plan.shards import position_of
from ..plan.tiling import shares_experts
from ..plan.zero import splits_gradients
from .recipe import Recipe


def refuse_plan(plan: Plan, num_ranks: int) -> None:
    """Refuse a plan that breaks a rule or that this version cannot play; the error lists every reason.

    A plan that was built in memory has passed no reader, so the rules are checked here too.
    """
    if faults := check_plan(plan):
        raise InvalidFileError("the plan", faults)
    if num_ranks != len(plan.devices):
        raise UsageError(
            f"the plan uses {len(plan.devices)} devices, but there are {num_ranks} ranks; start one rank a "
            "device (torchrun --nproc-per-node, or `arachne run PLAN -- train.py`)"
        )
    refuse_unrunnable(plan)
    refuse_without_deepspeed(plan)


def refuse_recipe(plan: Plan, recipe: Recipe) -> None:
    """Refuse what changes gradients behind a backward where ZeRO-2 or 3 has summed them within it already."""
    asked = {
        "precision": recipe.precision,
        "accumulate": recipe.accumulate,
        "compile": recipe.compile or None,
    }
    used = ", ".join(name for name, value in asked.items() if value is not None)
    stages = ((p, s, stage) for p, each in enumerate(plan.pipelines) for s, stage in enumerate(each.stages))
    for p, s, stage in stages:
        if used and splits_gradients(stage):
            raise UnsupportedPlanError(
                f"$.pipelines[{p}].stages[{s}].zero is {stage.zero}, which runs without {used}: DeepSpeed "
                "sums gradients within each backward; set it to 1, or leave that out"
            )


def refuse_model(plan: Plan, parts: ModelParts, *, stochastic: bool) -> None:
    """Refuse a model whose results would depend on how the plan splits a batch; ModelError."""
    if parts.num_blocks != plan.num_blocks:
        raise UsageError(
            f"the plan cuts {plan.num_blocks} blocks, but the model has {parts.num_blocks}; "
            "plan again for this model"
        )
    refuse_sharing(plan, parts)
    refuse_missing_experts(plan, parts)
    for block, name, module in parts.modules():
        if not stochastic and module.training and _drops(module):
            raise UnsupportedPlanError(
                f"block {block}: {name or 'it'} is {type(module).__name__}, which draws random numbers, so "
                "its result would depend on the plan; set its probability to 0, or waive this with "
                "stochastic=True"
            )
        if _mixes_samples(module) and not _whole_batch_at_once(plan, block):
            raise UnsupportedPlanError(
                f"block {block}: {name or 'it'} is {type(module).__name__} in training, whose statistics "
                f"would be of a part of the global batch of {plan.global_batch}; use LayerNorm or GroupNorm, "
                "put it into eval mode, or give its stage one replica, one micro-batch and no recomputation"
            )


def refuse_sharing(plan: Plan, parts: ModelParts) -> None:
    """Refuse replicas of several devices that cannot share the model out; UnsupportedPlanError lists all."""
    found: dict[str, None] = {}
    for place in places(plan):
        stage, position = holding(plan, place)[1], position_of(plan, place)
        path = f"$.pipelines[{place.pipeline}].stages[{place.stage}].replicas[{place.replica}]"
        degree = position.tensor[1]
        if degree > 1 and not parts.is_tensor_parallel:
            found[
                f"{path} is tensor-parallel over {degree} devices, but the model does not say how its "
                'modules are shared out; mark it with pipelined(..., tensor_parallel={"up": "colwise", '
                '"down": "rowwise"}), or make each device a replica with a share of its own'
            ] = None
            continue
        for block in stage.blocks:
            found |= {f"{path}: {told}": None for told in parts.refusals(block, position)}
    if found:
        raise UnsupportedPlanError("the model cannot be shared out as planned:\n  " + "\n  ".join(found))


def refuse_missing_experts(plan: Plan, parts: ModelParts) -> None:
    """Refuse to share out the experts of a stage whose blocks hold none that the engine knows."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            infos = (info for block in stage.blocks for info in parts.parameters_of(block))
            if shares_experts(stage) and not any(info.form.is_of_experts for info in infos):
                first, stop = stage.layers
                raise UnsupportedPlanError(
                    f"$.pipelines[{p}].stages[{s}] has expert_parallel {stage.expert_parallel} and "
                    f"expert_tensor {stage.expert_tensor}, but blocks {first} to {stop - 1} hold no experts "
                    "that can be shared out; make their mixture an arachne.MoE, or set both to 1"
                )


def refuse_gradient_hooks(parameters: Iterable[nn.Parameter], *, splits: bool) -> None:
    """Refuse hooks on gradients where a backward gives a part of one: they would see it before the sum."""
    for parameter in parameters if splits else ():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook on its gradient, which would be "
                "called for each micro-batch of each replica, before the sum; change gradients where they "
                "are whole (engine.optimizer.register_step_pre_hook), or remove the hook"
            )


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return True
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0


def _mixes_samples(module: nn.Module) -> bool:
    """Whether statistics over the samples of a call are used, or kept, in training."""
    if not isinstance(module, _NormBase) or not module.training:
        return False
    per_sample = isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
    return not per_sample or bool(module.track_running_stats)


def sees_whole_batch(plan: Plan, stage: Stage) -> bool:
    """Whether a stage's blocks see all samples of the global batch side by side."""
    (first, *others) = plan.pipelines
    return not others and first.micro_batches == len(stage.replicas) == 1


def runs_once(plan: Plan, stage: Stage) -> bool:
    """Whether a stage's blocks run once a step, on the whole global batch."""
    return sees_whole_batch(plan, stage) and not stage.recompute


def _whole_batch_at_once(plan: Plan, block: int) -> bool:
    return all(runs_once(plan, s) for p in plan.pipelines for s in p.stages if block in s.blocks)


def refuse_rows(num_rows: int, plan: Plan) -> None:
    """UsageError for a batch of no rows, or of more than the plan's."""
    if not 1 <= num_rows <= plan.global_batch:
        raise UsageError(
            f"a batch of {num_rows} rows; the plan's global_batch is {plan.global_batch}; "
            "only the last batch of an epoch may have fewer, but not none"
        )
