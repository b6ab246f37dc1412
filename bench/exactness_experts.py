"""Plans that share out experts against a single process: random tilings of stages in random plans.

EP x ETP x EDP in stages with and without tensor parallel, in pipelines whose tilings differ, under every
schedule; five experts and an inner width of five, which hardly any degree divides; batches that leave
replicas without rows.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import msgspec
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.plan.plan import Pipeline, Plan, ScheduleKind, Stage
from arachne_runtime.plan.rules import check_plan

from .cases import SEQUENCE, WIDTH, Case, Decoder
from .exactness_frame import Kind, random_settings
from .exactness_plans import SINGLE_SHARE, random_plan
from .exactness_tensor import APART, DIVIDES, Attention, random_tensor_plan

EXPERTS, TOP_K, INNER, BALANCE = 5, 2, 5, 0.05


class Layer(nn.Module):
    """Attention and a mixture of experts, both behind a norm."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.norm, self.moe_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(fused=False)
        self.moe = arachne.MoE(WIDTH, INNER, EXPERTS, TOP_K, activation=activation, balance=BALANCE)

    def forward(self, x, marked, half, *, position):
        x = x + self.attention(self.norm(x) + position)
        return x + self.moe(self.moe_norm(x)), marked, half


ATTENTION = {name: rule for name, rule in APART.items() if name.startswith(("embed", "attention", "head"))}


@arachne.pipelined(
    first="embed", blocks="layers", last="head", context="context", divides=DIVIDES, tensor_parallel=ATTENTION
)
class Mixture(Decoder):
    """A decoder of ``num_layers`` layers with experts."""

    def __init__(self, num_layers: int, tied: bool, activation: str) -> None:
        super().__init__((Layer(activation) for _ in range(num_layers)), tied)


@dataclass(frozen=True)
class ExpertsCase(Case):
    """A case with a mixture of experts."""

    activation: str = "swiglu"

    def model(self) -> Mixture:
        return Mixture(self.plan.num_blocks - 2, self.tied, self.activation)


def random_experts_case(source: random.Random, index: int) -> ExpertsCase:
    """Settings of every kind."""
    plan = random_tiled_plan(source)
    return ExpertsCase(
        **random_settings(source, plan, index, single_share=SINGLE_SHARE),
        evaluates=source.random() < 0.2,
        activation=source.choice(("swiglu", "gelu")),
    )


def random_tiled_plan(source: random.Random) -> Plan:
    """A random plan in which at least one stage shares out its experts."""
    while True:
        plan = _random_plan(source)
        pipelines = tuple(_tiled(source, plan, pipeline) for pipeline in plan.pipelines)
        found = msgspec.structs.replace(plan, pipelines=pipelines)
        if found != plan and not check_plan(found):
            return found


def _random_plan(source: random.Random) -> Plan:
    """Of two nodes without tensor parallel, or of one with it."""
    if source.random() < 0.5:
        return random_plan(source, source.choice(list(ScheduleKind)))
    return random_tensor_plan(source)


def _tiled(source: random.Random, plan: Plan, pipeline: Pipeline) -> Pipeline:
    stages = tuple(_with_tiles(source, plan, stage) for stage in pipeline.stages)
    return msgspec.structs.replace(pipeline, stages=stages)


def _with_tiles(source: random.Random, plan: Plan, stage: Stage) -> Stage:
    """Any tiling of a stage that holds a layer."""
    if not set(stage.blocks) & set(range(1, plan.num_blocks - 1)):
        return stage
    ep, etp = source.choice(list(_tilings(len(stage.devices))))
    return msgspec.structs.replace(stage, expert_parallel=ep, expert_tensor=etp)


def _tilings(num_devices: int) -> Iterator[tuple[int, int]]:
    for ep, etp in product(range(1, num_devices + 1), repeat=2):
        if num_devices % (ep * etp) == 0 and ep <= EXPERTS and etp <= INNER:
            yield ep, etp


MIXTURE = Kind(name="experts", draw=random_experts_case, full=40, quick=3)
assert SEQUENCE * TOP_K < WIDTH * EXPERTS, "some experts get no token of a sample"
