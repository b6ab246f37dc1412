"""Plans in bfloat16 and float16, with frozen blocks and stages, and with an evaluation behind training."""

import random
from dataclasses import replace
from functools import partial

import torch

from arachne_runtime.engine.precision import Precision
from arachne_runtime.plan.plan import ScheduleKind

from .cases import Case
from .exactness_frame import Kind
from .exactness_plans import BLOCKS, random_case
from .exactness_tensor import TensorCase, random_tensor_case

SCHEDULES = (
    ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE,
)  # fmt: skip
BOUNDS = {Precision.BF16: 0.03, Precision.FP16: 0.004}
"""Largest absolute difference (measured: 0.0078 and 0.00104). A forward rounds each sample alike under every
plan; gradients of weights are rounded once a micro-batch, to 8 bits (bfloat16) or 11 (float16)."""
TENSOR_BOUNDS = {Precision.BF16: 0.15, Precision.FP16: 0.015}
"""Measured: 0.057 and 0.0090; parts of products and of gradients are rounded on each device."""


def in_half(precision: Precision, source: random.Random, index: int) -> Case:
    """Parameters in float32, blocks and loss under autocast."""
    case = random_case(SCHEDULES, source, index)
    return replace(case, dtype=torch.float32, precision=precision, evaluates=True)


def shared_out(precision: Precision, source: random.Random, index: int) -> TensorCase:
    """As above, by tensor-parallel plans, whose parts of a product are rounded before they are added."""
    case = random_tensor_case(source, index)
    return replace(case, dtype=torch.float32, precision=precision, evaluates=True)


def frozen(source: random.Random, index: int) -> Case:
    """One to all blocks do not train, often those of a whole stage."""
    case = random_case(SCHEDULES, source, index)
    stage = source.choice([stage for pipeline in case.plan.pipelines for stage in pipeline.stages])
    others = source.sample(range(BLOCKS), source.randint(1, BLOCKS))
    blocks = set(stage.blocks) if source.random() < 0.5 else set(others)
    if case.tied and blocks & {0, BLOCKS - 1}:
        blocks |= {0, BLOCKS - 1}  # one parameter of both
    return replace(case, frozen=tuple(sorted(blocks)))


def evaluated(source: random.Random, index: int) -> Case:
    """Three batches, the first two of any size."""
    return replace(random_case(SCHEDULES, source, index), evaluates=True)


PRECISION = tuple(
    Kind(
        name=str(precision),
        draw=partial(in_half, precision),
        full=16,
        quick=2,
        bound=BOUNDS[precision],
    )
    for precision in Precision
)
TENSOR_PRECISION = tuple(
    Kind(
        name=f"tensor-{precision}",
        draw=partial(shared_out, precision),
        full=8,
        quick=1,
        bound=TENSOR_BOUNDS[precision],
    )
    for precision in Precision
)
FROZEN = Kind(name="frozen", draw=frozen, full=24, quick=2)
EVALUATED = Kind(name="evaluate", draw=evaluated, full=12, quick=2)
