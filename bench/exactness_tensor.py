"""Tensor-parallel plans against a single process: a model that shares out all that can be, and random plans.

Heads of q and fewer of k and v, fused or not, norms of q and k over sharded heads, an inner width that no
degree divides, a vocabulary that does not divide, tied and not, whole logits and sharded ones, frozen shards.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

import arachne_runtime as arachne
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage

from .cases import IGNORED, SEQUENCE, VOCABULARY, WIDTH, Case, Decoder
from .exactness_frame import Kind, random_settings
from .exactness_plans import random_cuts

HEADS, GROUPS, INNER, BLOCKS = 4, 2, 10, 5
SINGLE_SHARE = 6
"""One plan in so many is trained in float32."""


class Attention(nn.Module):
    """Causal attention with grouped k and v, normed q and k: (B, S, D) → (B, S, D)."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.width = HEADS, GROUPS, WIDTH // HEADS
        if fused:
            self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * self.width)
        else:
            self.q = nn.Linear(WIDTH, WIDTH, bias=False)
            self.k, self.v = (nn.Linear(WIDTH, GROUPS * self.width) for _ in range(2))
        self.norm_q, self.norm_k = (nn.RMSNorm(self.width, eps=1e-2) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.fused = fused

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.fused:
            sizes = [n * self.width for n in (self.heads, self.groups, self.groups)]
            parts = self.qkv(x_BSD).split(sizes, -1)
        else:
            parts = (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD))
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (self.norm_k(k), v))
        mixed = F.scaled_dot_product_attention(self.norm_q(q), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention and an MLP, both behind a norm, and a frozen pair of linear layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(fused)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.fixed = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        self.fixed.requires_grad_(False)

    def forward(self, x, marked, half, *, position):
        x = x + self.attention(self.norm(x) + position)
        return x + self.down(F.gelu(self.up(x))) + self.fixed(x) * half[:, None], marked, half


RULES = {
    "embed.table": "vocabulary",
    "attention.qkv": arachne.Colwise(heads=("heads", "groups", "groups"), repeat=True),
    "attention.out": "rowwise",
    "attention.norm_[qk]": "partial",
    "up": "colwise",
    "down": "rowwise",
    "fixed.0": "colwise",
    "fixed.2": "rowwise",
    "head.logits": "vocabulary",
}
APART = RULES | {
    "attention.q": arachne.Colwise(heads="heads"),
    "attention.[kv]": arachne.Colwise(heads="groups", repeat=True),
}
APART.pop("attention.qkv")
DIVIDES = {"attention": ("heads", "groups")}


class _Whole(Decoder):
    """A decoder of ``num_layers`` layers."""

    fused = True

    def __init__(self, num_layers: int, tied: bool) -> None:
        super().__init__((Layer(self.fused) for _ in range(num_layers)), tied)


PARTS = {"first": "embed", "blocks": "layers", "last": "head", "context": "context", "divides": DIVIDES}


@arachne.pipelined(**PARTS, tensor_parallel=RULES)
class Fused(_Whole):
    """One weight for q, k and v."""


@arachne.pipelined(**PARTS, tensor_parallel=APART)
class Apart(_Whole):
    """A weight for each of q, k and v."""

    fused = False


@dataclass(frozen=True)
class TensorCase(Case):
    """A case with shards."""

    fused: bool = True
    sharded_logits: bool = False

    def model(self) -> _Whole:
        return (Fused if self.fused else Apart)(self.plan.num_blocks - 2, self.tied)

    @property
    def loss(self):
        reduction = "sum" if self.by_items else "mean"
        if not self.sharded_logits:
            return lambda logits, batch: F.cross_entropy(
                logits.flatten(0, 1), batch["targets"].flatten(), reduction=reduction
            )
        return arachne.vocabulary_parallel(
            lambda logits, batch: arachne.vocabulary_parallel_cross_entropy(
                logits.flatten(0, 1), batch["targets"].flatten(), reduction=reduction, ignore_index=IGNORED
            )
        )


def random_tensor_case(source: random.Random, index: int) -> TensorCase:
    """Settings of every kind."""
    plan = random_tensor_plan(source)
    return TensorCase(
        **random_settings(source, plan, index, single_share=SINGLE_SHARE),
        fused=source.random() < 0.5,
        sharded_logits=source.random() < 0.5,
    )


def random_tensor_plan(source: random.Random, max_ranks: int = 6) -> Plan:
    """One or two pipelines whose replicas have 1, 2 or 4 devices, at least one of them more than 1."""
    groups = _groups(source, source.randint(2, max_ranks))
    schedule = source.choice(tuple(ScheduleKind))
    cuts = random_cuts(source, len(groups), source.randint(1, min(2, len(groups))))
    pipelines = [_pipeline(source, groups[a:b], schedule) for a, b in pairwise(cuts)]
    return Plan(
        model="tiny",
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=SEQUENCE,
        schedule=schedule,
        pipelines=tuple(pipelines),
    )


def _groups(source: random.Random, num_ranks: int) -> list[tuple[str, ...]]:
    """Devices in groups of 1, 2 or 4, each in one node and in any order."""
    devices = [f"a:{index}" for index in range(num_ranks)]
    source.shuffle(devices)
    groups: list[tuple[str, ...]] = []
    while devices:
        fitting = [n for n in (1, 2, 4) if n <= len(devices) and (groups or n > 1)]
        size = source.choice(fitting)
        groups.append(tuple(devices[:size]))
        devices = devices[size:]
    source.shuffle(groups)
    return groups


def _pipeline(source: random.Random, groups: Sequence[tuple[str, ...]], schedule: ScheduleKind) -> Pipeline:
    """Interleaved, each set of devices holds one or two stages."""
    num_rows = source.randint(1, min(len(groups), BLOCKS))
    spans = list(pairwise(random_cuts(source, len(groups), num_rows)))
    micro_batch = max(stop - start for start, stop in spans) + source.randint(0, 2)
    rows = []
    for start, stop in spans:
        shares = [b - a for a, b in pairwise(random_cuts(source, micro_batch, stop - start))]
        mine = zip(groups[start:stop], shares, strict=True)
        rows.append(tuple(Replica(devices=devices, share=share) for devices, share in mine))
    twice = schedule is ScheduleKind.INTERLEAVED and 2 * num_rows <= BLOCKS
    rows *= source.randint(1, 2) if twice else 1
    stages = tuple(
        Stage(layers=layers, recompute=source.random() < 0.3, replicas=replicas)
        for layers, replicas in zip(pairwise(random_cuts(source, BLOCKS, len(rows))), rows, strict=True)
    )
    return Pipeline(micro_batches=source.randint(1, 4), micro_batch=micro_batch, stages=stages)


TENSOR = Kind(name="tensor", draw=random_tensor_case, full=48, quick=3)
assert VOCABULARY % 2, "a vocabulary that no degree divides"
