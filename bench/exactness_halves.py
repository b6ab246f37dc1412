"""A decoder whose layers are cut in attention and MLP blocks, under random plans of every schedule."""

import random
from dataclasses import dataclass, fields

import torch.nn.functional as F
from torch import nn

from arachne_runtime.model import pipelined
from arachne_runtime.plan.plan import ScheduleKind

from .cases import HEADS, WIDTH, Case, Decoder
from .exactness_frame import Kind
from .exactness_plans import random_case


class HalfLayer(nn.Module):
    """Attention and an MLP, each with its norm and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = nn.GELU()

    def attention(self, x, marked, half, *, position):
        B, S, D = x.shape
        mixed = self.mix(self.norm_1(x) + position)
        q, k, v = mixed.view(B, S, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, D)
        return x + self.out(mixed), marked, half

    def mlp(self, x, marked, half):
        return x + self.down(self.activation(self.up(self.norm_2(x)))) * half[:, None], marked, half

    def forward(self, x, marked, half, *, position):
        return self.mlp(*self.attention(x, marked, half, position=position))


@pipelined(
    first="embed",
    blocks="layers",
    last="head",
    context="context",
    halves={"attention": ("norm_1", "mix", "out"), "mlp": ("norm_2", "up", "down")},
)
class HalfGPT(Decoder):
    """``2 * num_layers + 2`` blocks."""

    def __init__(self, num_layers: int, tied: bool) -> None:
        super().__init__((HalfLayer() for _ in range(num_layers)), tied)


@dataclass(frozen=True)
class HalfCase(Case):
    """A case of half layers."""

    def model(self) -> HalfGPT:
        return HalfGPT((self.plan.num_blocks - 2) // 2, self.tied)

    def global_names(self, model: nn.Module) -> dict[str, str]:
        """Names in the model → names in the blocks."""
        last, mlp = self.plan.num_blocks - 1, ("norm_2", "up", "down")
        found = {}
        for name, _ in model.named_parameters():
            place, rest = name.split(".", 1)
            if place == "layers":
                index, rest = rest.split(".", 1)
                found[name] = f"blocks.{1 + 2 * int(index) + (rest.split('.')[0] in mlp)}.{rest}"
            else:
                found[name] = f"blocks.{0 if place == 'embed' else last}.{rest}"
        return found


def random_half_case(source: random.Random, index: int) -> HalfCase:
    """A case of any schedule."""
    case = random_case(tuple(ScheduleKind), source, index)
    return HalfCase(**{field.name: getattr(case, field.name) for field in fields(case)})


HALVES = Kind(name="half-layers", draw=random_half_case, full=24, quick=2)
