"""Pictures of disks, rings, squares, crosses and stripes under noise: a data set that needs no download."""

import torch
from torch import Tensor

KINDS = ("disk", "ring", "square", "cross", "stripes")
SIZE = 32
"""Pixels of a side."""


class Shapes(torch.utils.data.Dataset):
    """Item i is ((3, SIZE, SIZE) floats, number of the kind), and the same at every reading."""

    def __init__(self, num_samples: int = 4096, noise: float = 0.1) -> None:
        self.num_samples = num_samples
        self.noise = noise

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        random = torch.Generator().manual_seed(index)
        kind = index % len(KINDS)
        x, y, radius, angle = torch.rand(4, generator=random).tolist()
        picture_HW = draw(kind, 10 + 12 * x, 10 + 12 * y, 6 + 4 * radius, 3.14 * angle)
        colour_C = 0.3 + 0.7 * torch.rand(3, generator=random)
        grain_CHW = self.noise * torch.randn(3, SIZE, SIZE, generator=random)
        return picture_HW * colour_C[:, None, None] + grain_CHW, kind


def draw(kind: int, x: float, y: float, radius: float, angle: float) -> Tensor:
    """1 inside the shape and 0 outside: (SIZE, SIZE)."""
    line = torch.arange(SIZE, dtype=torch.float32)
    across_HW, down_HW = torch.meshgrid(line - x, line - y, indexing="xy")
    turn = torch.tensor(angle)
    u_HW = across_HW * turn.cos() + down_HW * turn.sin()
    v_HW = down_HW * turn.cos() - across_HW * turn.sin()
    distance_HW = (u_HW**2 + v_HW**2).sqrt()
    edge_HW = torch.maximum(u_HW.abs(), v_HW.abs())
    return {
        "disk": distance_HW < radius,
        "ring": (distance_HW < radius) & (distance_HW > 0.6 * radius),
        "square": edge_HW < 0.85 * radius,
        "cross": (torch.minimum(u_HW.abs(), v_HW.abs()) < 0.3 * radius) & (edge_HW < radius),
        "stripes": (u_HW.remainder(4) < 2) & (edge_HW < radius),
    }[KINDS[kind]].float()


def random_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Pictures that cost as much as real ones: what `arachne profile` times."""
    return torch.randn(rows, 3, SIZE, SIZE), torch.randint(len(KINDS), (rows,))
