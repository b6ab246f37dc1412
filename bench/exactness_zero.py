"""Plans that split optimizer states by ZeRO (DeepSpeed) against a single process.

ZeRO-1 on some stages of pipelines of every schedule, with unequal shares, beside others that hold the same
blocks whole or split otherwise, and under tensor parallelism; ZeRO-2 and 3 of data-parallel plans.
"""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from msgspec.structs import replace as with_fields

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage

from .cases import SEQUENCE, Case, Outcome, train_by_plan
from .exactness_frame import Kind
from .exactness_plans import random_case
from .exactness_tensor import TensorCase, random_tensor_case

MAX_WIDTH = 4
SPLIT_SHARE = 0.8
"""Stages of several replicas that split their states, of all of them."""


def random_zero_case(schedules: Sequence[ScheduleKind], source: random.Random, index: int) -> Case:
    """By turns: parameters that few samples use (SGD); all used (AdamW); with tensor parallelism."""
    match index % 3:
        case 0:
            return replace(_with_zero(source, random_case(schedules, source, index)), adam=False)
        case 1:
            case = random_case(schedules, source, index)
            shared = {field.name: getattr(case, field.name) for field in fields(case)}
            return _with_zero(source, TensorCase(**(shared | {"adam": True, "dtype": torch.float64})))
        case _:
            return _with_zero(source, random_tensor_case(source, index))


def _with_zero(source: random.Random, case: Case) -> Case:
    """ZeRO-1 on most stages of several replicas; all stages of a device are alike in it."""
    pipelines = []
    for pipeline in case.plan.pipelines:
        chosen: dict[str, int] = {}
        zero = [chosen.setdefault(s.devices[0], source.random() < SPLIT_SHARE) for s in pipeline.stages]
        stages = (with_fields(s, zero=int(z)) for s, z in zip(pipeline.stages, zero, strict=True))
        pipelines.append(with_fields(pipeline, stages=tuple(stages)))
    return replace(case, plan=with_fields(case.plan, pipelines=tuple(pipelines)))


def random_data_parallel_case(source: random.Random, index: int) -> Case:
    """ZeRO-2 and 3 in turn, which DeepSpeed steps in float32, on one stage of unequal replicas."""
    width = source.randint(2, MAX_WIDTH)
    replicas = tuple(Replica(devices=(f"a:{r}",), share=source.randint(1, 3)) for r in range(width))
    stage = Stage(layers=(0, source.randint(3, 5)), zero=2 + index % 2, replicas=replicas)
    micro_batch = sum(stage.shares)
    pipeline = Pipeline(micro_batches=source.randint(1, 4), micro_batch=micro_batch, stages=(stage,))
    total = pipeline.micro_batches * micro_batch
    plan = Plan(model="tiny", global_batch=total, sequence=SEQUENCE, pipelines=(pipeline,))
    return TensorCase(
        plan=plan,
        tied=source.random() < 0.5,
        adam=source.random() < 0.5,
        dtype=torch.float32,
        clip_norm=source.choice((None, 0.1)),
        by_items=source.random() < 0.4,
        scheduled=source.random() < 0.3,
        rows=(*(source.randint(1, total) for _ in range(2)), total),
        fused=source.random() < 0.5,
    )


def _by_plan(case: Case) -> Outcome:
    """No rank has whole gradients: norms, losses and parameters are compared."""
    return replace(train_by_plan(case), gradients={})


ZERO = Kind(
    name="zero", draw=partial(random_zero_case, tuple(ScheduleKind)), full=30, quick=6, needs="deepspeed"
)
ZERO_DATA_PARALLEL = Kind(
    name="zero-data-parallel",
    draw=random_data_parallel_case,
    full=12,
    quick=2,
    by_plan=_by_plan,
    needs="deepspeed",
)
