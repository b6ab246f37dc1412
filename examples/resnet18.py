"""ResNet-18 as published (arXiv 1512.03385, table 1), with batch normalisation."""

import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions beside a short cut: (B, C, H, W) → (B, D, H / stride, W / stride)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.short = nn.Identity()
        if stride != 1 or inner != outer:
            projection = nn.Conv2d(inner, outer, 1, stride=stride, bias=False)
            self.short = nn.Sequential(projection, nn.BatchNorm2d(outer))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.body(x_BCHW) + self.short(x_BCHW))


class ResNet18(nn.Sequential):
    """(B, 3, H, W) → (B, K); 11.2 million parameters at the published width."""

    def __init__(self, kinds: int, width: int = 64) -> None:
        stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        levels = []
        for level in range(4):
            outer = width << level
            inner = outer if level == 0 else outer // 2
            first = Residual(inner, outer, stride=1 if level == 0 else 2)
            levels += [first, Residual(outer, outer, stride=1)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 3, kinds))
        super().__init__(stem, *levels, head)
