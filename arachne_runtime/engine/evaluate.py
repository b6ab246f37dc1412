"""Forward passes over batches without training: modules in eval mode, no gradients, one loss over all."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError
from ..mesh import Mesh


@contextmanager
def evaluating(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode and no gradients; afterwards every module is in the mode that it had."""
    trained = [module for stage in stages for module in stage.modules() if module.training]
    for stage in stages:
        stage.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True


@dataclass(slots=True)
class Tally:
    """What an evaluation adds up on one rank."""

    loss: Tensor
    """Sum of the means of the batches, each times its samples or items; this rank's part of it."""
    num_samples: int = 0
    num_items: int = 0
    """Of all ranks, as the samples are."""
    num_batches: int = 0
    content: int = 0
    """32 bits from the batches, to compare with other ranks."""

    @classmethod
    def on(cls, device: torch.device) -> "Tally":
        """Nothing yet."""
        return cls(torch.zeros((), dtype=torch.float64, device=device))

    def add(self, loss: Tensor, num_rows: int, num_items: int, content: int) -> None:
        """One batch: this rank's part of its mean, which is over ``num_items``."""
        self.loss += loss * num_items
        self.num_samples += num_rows
        self.num_items += num_items
        self.num_batches += 1
        self.content = zlib.crc32(content.to_bytes(4, "big"), self.content)

    def mean(self, mesh: Mesh, settings: int) -> float:
        """The loss over all batches, the same on every rank.

        Raises:
            UsageError: No samples or items at all; ranks with other batches or settings.

        """
        mine = (self.num_batches, self.num_samples, self.content, settings)
        total = torch.cat((self.loss.reshape(1), self.loss.new_tensor(mine)))
        if mesh.num_ranks > 1:
            dist.all_reduce(total)
        loss, *sums = total.tolist()
        if any(found != own * mesh.num_ranks for found, own in zip(sums, mine, strict=True)):
            raise UsageError(
                f"rank {mesh.rank} evaluated {self.num_batches} batches with {self.num_samples} samples; the "
                f"mean of all ranks is {sums[0] / mesh.num_ranks:g} with {sums[1] / mesh.num_ranks:g}, or "
                "they saw other samples or have other settings; give all the same batches, in one order"
            )
        if self.num_items == 0:
            raise UsageError(
                f"an evaluation of {self.num_samples} samples has no items to take a mean over; give batches "
                "that are not empty"
            )
        return float(loss) / self.num_items
