"""What DeepSpeed needs to train a plan by itself: configuration and explicit partition; or why it cannot."""

from collections.abc import Iterator
from dataclasses import dataclass

from arachne_runtime.errors import UnsupportedPlanError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Pipeline, Plan, ScheduleKind, Stage

MOST_ZERO_IN_PIPELINES = 1
"""DeepSpeed 0.19.8 asserts that PipelineModule has no ZeRO-2 and 3."""


class ZeroOptimization(Document, frozen=True, kw_only=True):
    """Of ``ds_config.json``."""

    stage: int


class DeepSpeedConfig(Document, frozen=True, kw_only=True):
    """``ds_config.json``, in DeepSpeed's names; the optimizer is the script's."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    """0: DeepSpeed's default would clip to a norm of 1."""
    zero_optimization: ZeroOptimization
    zero_allow_untested_optimizer: bool


class Partition(Document, frozen=True, kw_only=True):
    """``partition.json``: which blocks and devices are where, for ``PipelineModule``."""

    parts: tuple[int, ...]
    """Borders of the stages in blocks: the ``parts`` of a PipelineModule whose layers are the blocks."""
    recompute: bool
    """``activation_checkpoint_interval`` of 1 block, or 0."""
    tensor_parallel: int
    """Degree; DeepSpeed leaves it to the model (mpu)."""
    ranks: tuple[str, ...]
    """Device of each rank, in the order of DeepSpeed's PipeModelDataParallelTopology: stage, replica, TP."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """Both files."""

    config: DeepSpeedConfig
    partition: Partition

    @classmethod
    def of(cls, plan: Plan) -> "DeepSpeedFiles":
        """Both files of a plan.

        Raises:
            UnsupportedPlanError: What DeepSpeed cannot express, every reason with its address.

        """
        if found := list(inexpressible(plan)):
            lines = "\n  ".join(found)
            raise UnsupportedPlanError(
                f"DeepSpeed cannot express the plan:\n  {lines}\n"
                "run it with `arachne run`, or plan for equal devices"
            )
        first = plan.pipelines[0]
        config = DeepSpeedConfig(
            train_batch_size=plan.global_batch,
            train_micro_batch_size_per_gpu=first.stages[0].replicas[0].share,
            gradient_accumulation_steps=first.micro_batches,
            gradient_clipping=0.0,
            zero_optimization=ZeroOptimization(stage=first.stages[0].zero),
            zero_allow_untested_optimizer=True,
        )
        return cls(config, _partition(plan))


def inexpressible(plan: Plan) -> Iterator[str]:
    """Everything in a plan that has no words in DeepSpeed, with its address.

    Its form: one cut for all; in each stage equally many replicas of one share and one TP degree; 1F1B.
    """
    first = plan.pipelines[0]
    if len(first.stages) > 1 and plan.schedule is not ScheduleKind.ONE_F_ONE_B:
        yield f"$.schedule is {plan.schedule}; DeepSpeed's pipelines play 1f1b"
    for p, pipeline in enumerate(plan.pipelines):
        yield from _of_pipeline(f"$.pipelines[{p}]", pipeline, first)
        for s, stage in enumerate(pipeline.stages):
            yield from _of_stage(f"$.pipelines[{p}].stages[{s}]", pipeline, stage, first.stages[0])


def _of_pipeline(path: str, pipeline: Pipeline, first: Pipeline) -> Iterator[str]:
    cut, wanted = ([s.layers for s in each.stages] for each in (pipeline, first))
    if cut != wanted:
        yield f"{path}.stages cut the blocks at {_borders(pipeline)}, pipeline 0 at {_borders(first)}"
    if pipeline.micro_batches != first.micro_batches:
        yield f"{path}.micro_batches is {pipeline.micro_batches}, of pipeline 0 {first.micro_batches}"


def _of_stage(path: str, pipeline: Pipeline, stage: Stage, first: Stage) -> Iterator[str]:
    width = len(pipeline.stages[0].replicas)
    if len(stage.replicas) != width:
        yield f"{path}.replicas are {len(stage.replicas)}, of the first stage {width}"
    model = first.replicas[0]
    for r, replica in enumerate(stage.replicas):
        if replica.share != model.share:
            yield f"{path}.replicas[{r}].share is {replica.share}, of the first replica {model.share}"
        if (degree := len(replica.devices)) != len(model.devices):
            yield f"{path}.replicas[{r}].devices are {degree}, of the first replica {len(model.devices)}"
    for name in ("zero", "recompute"):
        mine, wanted = getattr(stage, name), getattr(first, name)
        if mine != wanted:
            yield f"{path}.{name} is {str(mine).lower()}, of the first stage {str(wanted).lower()}"
    if len(pipeline.stages) > 1 and stage.zero > MOST_ZERO_IN_PIPELINES:
        yield f"{path}.zero is {stage.zero}; in pipelines of several stages DeepSpeed has 0 and 1"
    for name in ("expert_parallel", "expert_tensor"):
        if (value := getattr(stage, name)) > 1:
            yield f"{path}.{name} is {value}; DeepSpeed shares out experts of its own MoE layer only"


def _borders(pipeline: Pipeline) -> str:
    return ", ".join(str(stage.layers[0]) for stage in pipeline.stages[1:]) or "none"


def _partition(plan: Plan) -> Partition:
    first = plan.pipelines[0]
    ranks = [
        device
        for s in range(len(first.stages))
        for pipeline in plan.pipelines
        for device in pipeline.stages[s].devices
    ]
    return Partition(
        parts=(0, *(stage.layers[1] for stage in first.stages)),
        recompute=first.stages[0].recompute,
        tensor_parallel=len(first.stages[0].replicas[0].devices),
        ranks=tuple(ranks),
    )
