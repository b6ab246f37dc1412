"""A vision transformer for small pictures: the class token and the positions are parameters of a block."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from shapes import KINDS, SIZE, random_batch
from torch import Tensor, nn

import arachne_runtime as arachne


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    patch: int = 4
    width: int = 96
    heads: int = 4
    layers: int = 4


class Patches(nn.Module):
    """Squares of the picture as tokens behind a class token: (B, 3, H, W) → (B, S, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        num_tokens = (SIZE // config.patch) ** 2 + 1
        self.project = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.first = nn.Parameter(torch.empty(1, 1, config.width))
        self.position = nn.Parameter(torch.empty(1, num_tokens, config.width))

    def forward(self, pictures_BCHW: Tensor) -> Tensor:
        tokens_BSD = self.project(pictures_BCHW).flatten(2).transpose(1, 2)
        first_B1D = self.first.expand(len(tokens_BSD), -1, -1)
        return torch.cat((first_B1D, tokens_BSD), 1) + self.position


class Layer(nn.Module):
    """Self-attention and an MLP, each behind a norm: (B, S, D) → (B, S, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def attention(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BSD).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.projection(mixed.transpose(1, 2).flatten(-2))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD))))


class Head(nn.Module):
    """Scores of each kind from the class token: (B, S, D) → (B, K)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.scores = nn.Linear(config.width, len(KINDS))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.scores(self.norm(x_BSD[:, 0]))


def initialise(module: nn.Module, block: int) -> None:
    """Small normal numbers (arXiv 2010.11929); the engine calls it for each block under its own seed."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        if isinstance(part, Patches):
            nn.init.trunc_normal_(part.first, std=0.02)
            nn.init.trunc_normal_(part.position, std=0.02)


@arachne.pipelined(first="patches", blocks="layers", last="head", init=initialise)
class ViT(nn.Module):
    """(B, 3, H, W) → (B, K)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patches = Patches(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(self, pictures_BCHW: Tensor) -> Tensor:
        x_BSD = self.patches(pictures_BCHW)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


def loss(scores_BK: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the right kind, in nats."""
    return F.cross_entropy(scores_BK.float(), batch[1])


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


workload = arachne.Workload(
    name="vit",
    model=lambda: ViT(Config()),
    loss=loss,
    optimizer=adamw,
    batch=random_batch,
    sequence=(SIZE // Config.patch) ** 2 + 1,
)
