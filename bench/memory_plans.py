"""Random plans of every kind whose peaks bench.memory compares, and the models that they train.

Plans of the example's GPT are dense, half-layered, in bfloat16, tensor-parallel (logits whole and shared
out), interleaved, zero-bubble or split by ZeRO; those of the example's Mixtral share out its experts.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arachne_runtime as arachne
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.rules import check_plan
from arachne_runtime.plan.runnable import obstacles
from examples import gpt, mixtral

MAX_RANKS, MAX_SHARE = 5, 12
TENSOR_RANKS = 6
DEVICES = tuple(f"{node}:{index}" for node in "ab" for index in range(3))
DEGREES = (1, 2, 4)
RECOMPUTED = 0.3
"""Of all stages."""
Group = tuple[str, ...]
"""Devices of a replica."""
Schedules = Sequence[ScheduleKind]
PLAIN = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)


class HalfLayer(gpt.Layer):
    """The example's layer as two blocks."""

    def attention(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + super().attention(self.attention_norm(x_BSD))

    def mlp(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD))))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.mlp(self.attention(x_BSD))


@arachne.pipelined(
    first="embed",
    blocks="layers",
    last=("norm", "head"),
    init=gpt.initialise,
    halves={"attention": ("attention_norm", "qkv", "projection"), "mlp": ("mlp_norm", "up", "down")},
)
class HalfGPT(gpt.GPT):
    """The example's model, whose layers are cut."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(HalfLayer(config) for _ in range(config.layers))


@arachne.vocabulary_parallel
def loss_of_shards(logits_BSV: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The example's, of logits that stay shared out."""
    return arachne.vocabulary_parallel_cross_entropy(logits_BSV.flatten(0, 1), batch[1].flatten())


EIGHT_HEADS = gpt.Config(heads=8)
"""Of which 4 devices can have equal parts; the example's six they cannot."""
WORKLOADS: Mapping[str, arachne.Workload] = {
    "gpt": gpt.workload,
    "half-gpt": replace(gpt.workload, name="half-gpt", model=lambda: HalfGPT(gpt.Config())),
    "bf16-gpt": replace(
        gpt.workload, name="bf16-gpt", model=lambda: gpt.GPT(gpt.Config()).to(torch.bfloat16)
    ),
    "eight-heads": replace(gpt.workload, name="eight-heads", model=lambda: gpt.GPT(EIGHT_HEADS)),
    "shared-logits": replace(
        gpt.workload, name="shared-logits", model=lambda: gpt.GPT(EIGHT_HEADS), loss=loss_of_shards
    ),
    "mixtral": mixtral.workload,
}
"""By name, as ranks are told."""
BLOCKS = dict.fromkeys(WORKLOADS, gpt.Config.layers + 2) | {
    "half-gpt": 2 * gpt.Config.layers + 2,
    "mixtral": mixtral.Config.layers + 2,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Plans of one sort."""

    name: str
    draw: Callable[[random.Random], Plan]
    workload: str = "gpt"
    full: int = 8
    quick: int = 2
    highest: float = 0.10
    """Most that may be predicted beyond what is held, of what is held."""
    needs: str = ""
    """A module without which none can run."""

    def plans(self, *, quick: bool) -> list[Plan]:
        """The same ones each time."""
        source = random.Random(2026 if self is DENSE else f"{self.name}:2026")
        return [self.draw(source) for _ in range(self.quick if quick else self.full)]

    @property
    def is_available(self) -> bool:
        """Whether what it needs is installed."""
        return not self.needs or find_spec(self.needs) is not None


def random_plan(source: random.Random, *, schedules: Schedules = PLAIN, workload: str = "gpt") -> Plan:
    """One or two unlike pipelines on one to five devices."""
    devices = list(DEVICES)
    source.shuffle(devices)
    used = [(device,) for device in devices[: source.randint(1, MAX_RANKS)]]
    return _plan_of(source, used, schedules, workload)


def random_tensor_plan(
    source: random.Random, *, schedules: Schedules = PLAIN, workload: str = "eight-heads"
) -> Plan:
    """One or two pipelines whose replicas have 1, 2 or 4 devices (Mixtral: 1 or 2), one at least above 1."""
    degrees = DEGREES[:2] if workload == "mixtral" else DEGREES
    devices = [f"a:{index}" for index in range(source.randint(2, TENSOR_RANKS))]
    groups: list[Group] = []
    while devices:
        size = source.choice([n for n in degrees if n <= len(devices) and (groups or n > 1)])
        groups.append(tuple(devices[:size]))
        devices = devices[size:]
    source.shuffle(groups)
    return _plan_of(source, groups, schedules, workload)


def zero_1_plan(source: random.Random) -> Plan:
    """Every stage of several replicas splits the states of its optimizer."""
    while True:
        draw = random_tensor_plan if source.random() < 0.25 else random_plan
        plan = draw(source, schedules=(ScheduleKind.ONE_F_ONE_B,), workload="eight-heads")
        pipelines = tuple(
            msgspec.structs.replace(p, stages=tuple(_split(stage) for stage in p.stages))
            for p in plan.pipelines
        )
        found = msgspec.structs.replace(plan, pipelines=pipelines)
        if found != plan and not list(obstacles(found)):
            return found


def zero_gradients_plan(level: int, source: random.Random) -> Plan:
    """One stage of two to four unequal replicas, which splits gradients too."""
    shares = [source.randint(1, 4) for _ in range(source.randint(2, 4))]
    replicas = tuple(Replica(devices=(f"a:{r}",), share=share) for r, share in enumerate(shares))
    stage = Stage(layers=(0, BLOCKS["gpt"]), zero=level, replicas=replicas)
    pipeline = Pipeline(micro_batches=source.randint(1, 4), micro_batch=sum(shares), stages=(stage,))
    return _with(("gpt", ScheduleKind.ONE_F_ONE_B), (pipeline,))


def tiled_plan(source: random.Random) -> Plan:
    """At least one stage shares out its experts: any EP x ETP, with and without tensor parallelism."""
    while True:
        draw = random_tensor_plan if source.random() < 0.4 else random_plan
        plan = draw(source, workload="mixtral")
        pipelines = tuple(
            msgspec.structs.replace(p, stages=tuple(_tiled(source, stage) for stage in p.stages))
            for p in plan.pipelines
        )
        found = msgspec.structs.replace(plan, pipelines=pipelines)
        if found != plan and not check_plan(found) and not list(obstacles(found)):
            return found


def _plan_of(source: random.Random, groups: Sequence[Group], schedules: Schedules, workload: str) -> Plan:
    cuts = random_cuts(source, len(groups), source.randint(1, min(2, len(groups))))
    interleaved = tuple(schedules) == (ScheduleKind.INTERLEAVED,)
    pipelines = tuple(
        _pipeline(source, groups[start:stop], BLOCKS[workload], interleaved) for start, stop in pairwise(cuts)
    )
    return _with((workload, source.choice(schedules)), pipelines)


def _with(what: tuple[str, ScheduleKind], pipelines: tuple[Pipeline, ...]) -> Plan:
    return Plan(
        model=WORKLOADS[what[0]].name,
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=WORKLOADS[what[0]].sequence,
        schedule=what[1],
        pipelines=pipelines,
    )


def _pipeline(source: random.Random, groups: Sequence[Group], blocks: int, interleaved: bool) -> Pipeline:
    """Interleaved, each set of devices holds two or three stages."""
    depth = source.randint(1, len(groups))
    spans = list(pairwise(random_cuts(source, len(groups), depth)))
    micro_batch = source.randint(max(stop - start for start, stop in spans), MAX_SHARE)
    chunks = source.randint(2, 3) if interleaved and 2 * depth <= blocks else 1
    if chunks * depth > blocks:
        chunks = 2
    cuts = pairwise(random_cuts(source, blocks, depth * chunks))
    rows: list[tuple[Replica, ...]] = []
    stages = []
    for index, layers in enumerate(cuts):
        if index < depth:
            start, stop = spans[index]
            shares = [b - a for a, b in pairwise(random_cuts(source, micro_batch, stop - start))]
            mine = zip(groups[start:stop], shares, strict=True)
            rows.append(tuple(Replica(devices=devices, share=share) for devices, share in mine))
        recompute = source.random() < RECOMPUTED
        stages.append(Stage(layers=layers, recompute=recompute, replicas=rows[index % depth]))
    return Pipeline(micro_batches=source.randint(1, 5), micro_batch=micro_batch, stages=tuple(stages))


def random_cuts(source: random.Random, total: int, parts: int) -> list[int]:
    """Borders of ``parts`` runs of at least one out of ``total``."""
    return [0, *sorted(source.sample(range(1, total), parts - 1)), total]


def _split(stage: Stage) -> Stage:
    return msgspec.structs.replace(stage, zero=int(len(stage.replicas) > 1))


def _tiled(source: random.Random, stage: Stage) -> Stage:
    if not set(stage.blocks) & set(range(1, BLOCKS["mixtral"] - 1)):
        return stage
    count = len(stage.devices)
    tilings = [
        (ep, etp)
        for ep in range(1, min(count, mixtral.Config.experts) + 1)
        for etp in range(1, count + 1)
        if count % (ep * etp) == 0 and mixtral.Config.experts % ep == 0
    ]
    ep, etp = source.choice(tilings)
    return msgspec.structs.replace(stage, expert_parallel=ep, expert_tensor=etp)


DENSE = Kind(name="dense", draw=random_plan, full=40, quick=4)
KINDS = (
    DENSE,
    Kind(
        name="half-layers",
        workload="half-gpt",
        draw=partial(random_plan, workload="half-gpt"),
    ),
    Kind(name="bf16", workload="bf16-gpt", draw=partial(random_plan, workload="bf16-gpt")),
    Kind(name="tensor", workload="eight-heads", draw=random_tensor_plan, full=12),
    Kind(
        name="shared-logits",
        workload="shared-logits",
        draw=partial(random_tensor_plan, workload="shared-logits"),
    ),
    Kind(name="interleaved", draw=partial(random_plan, schedules=(ScheduleKind.INTERLEAVED,)), full=8),
    Kind(name="zero-bubble", draw=partial(random_plan, schedules=(ScheduleKind.ZERO_BUBBLE,)), full=8),
    Kind(name="zero-1", workload="eight-heads", draw=zero_1_plan, needs="deepspeed"),
    Kind(name="zero-2", draw=partial(zero_gradients_plan, 2), full=4, highest=0.2, needs="deepspeed"),
    Kind(name="zero-3", draw=partial(zero_gradients_plan, 3), full=4, needs="deepspeed"),
    Kind(name="experts", workload="mixtral", draw=tiled_plan, full=8, highest=0.5),
)
