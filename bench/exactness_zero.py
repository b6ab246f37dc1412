"""Plans that split optimizer states by ZeRO (DeepSpeed) against a single process.

ZeRO-1 on some stages of pipelines of every schedule, with unequal shares, beside others that hold the same
blocks whole or split otherwise, and under tensor parallelism.
"""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from msgspec.structs import replace as with_fields

from arachne_runtime.plan.plan import ScheduleKind

from .cases import Case
from .exactness_frame import Kind
from .exactness_plans import random_case
from .exactness_tensor import TensorCase, random_tensor_case

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


ZERO = Kind(
    name="zero", draw=partial(random_zero_case, tuple(ScheduleKind)), full=30, quick=6, needs="deepspeed"
)
