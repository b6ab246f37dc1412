"""A ResNet for small pictures, with GroupNorm: its statistics are of one sample, so any split is exact."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from shapes import KINDS, random_batch
from torch import Tensor, nn

import arachne_runtime as arachne


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    width: int = 16
    groups: int = 4
    depths: tuple[int, ...] = (2, 2, 2)
    """Residual blocks at each resolution; width doubles and the picture halves between them."""


class Stem(nn.Sequential):
    """(B, 3, H, W) → (B, C, H, W)."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            nn.Conv2d(3, config.width, 3, padding=1, bias=False),
            nn.GroupNorm(config.groups, config.width),
            nn.ReLU(),
        )


class Residual(nn.Module):
    """Two convolutions beside a short cut: (B, C, H, W) → (B, D, H / stride, W / stride)."""

    def __init__(self, config: Config, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(config.groups, outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.GroupNorm(config.groups, outer),
        )
        same = stride == 1 and inner == outer
        self.short = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.body(x_BCHW) + self.short(x_BCHW))


class Head(nn.Module):
    """Mean over the picture, then the scores of each kind: (B, C, H, W) → (B, K)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, len(KINDS))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.scores(x_BCHW.mean((2, 3)))


@arachne.pipelined(first="stem", blocks="layers", last="head")
class ResNet(nn.Module):
    """(B, 3, H, W) → (B, K) (arXiv 1512.03385, with the norm of arXiv 1803.08494)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = Stem(config)
        self.layers = nn.ModuleList()
        inner = config.width
        for level, depth in enumerate(config.depths):
            for index in range(depth):
                outer = config.width << level
                self.layers.append(Residual(config, inner, outer, stride=2 if level and not index else 1))
                inner = outer
        self.head = Head(inner)

    def forward(self, pictures_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(pictures_BCHW)
        for layer in self.layers:
            x_BCHW = layer(x_BCHW)
        return self.head(x_BCHW)


def loss(scores_BK: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the right kind, in nats."""
    return F.cross_entropy(scores_BK.float(), batch[1])


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


workload = arachne.Workload(
    name="resnet",
    model=lambda: ResNet(Config()),
    loss=loss,
    optimizer=adamw,
    batch=random_batch,
    sequence=1,
)
