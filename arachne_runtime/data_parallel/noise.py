"""Squared norms of the gradients of each rank before they are summed, for the gradient noise scale."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..batch import Group, NoiseReading, SegmentNorms, measure_noise
from .link import Turn

NUM_TOLD = 2
"""Numbers that a rank tells of a sum: its amount, and the squared norm of its weighed gradient."""


@dataclass(slots=True)
class NoiseMeter:
    """The norms of one sum; they are told with the next one, so that no device is waited for."""

    mine: list[Tensor] = field(default_factory=list)
    """By bucket, of this rank's gradient times its part of the batch."""
    amount: float = 0.0
    """Samples or items of this rank; 0: the sum says nothing of noise."""
    samples: int = 0
    """Of all ranks."""
    summed: list[Tensor] = field(default_factory=list)
    """By bucket, of the sum."""

    def close(self, summed: list[Tensor], turn: Turn | None, *, is_plain: bool) -> None:
        """The sum has ended; ``is_plain``: it is of one batch of each rank."""
        counts = turn is not None and turn.num_rounds == 1 and is_plain
        self.summed = summed
        self.amount = turn.weight.mine if turn is not None and counts else 0.0
        self.samples = sum(turn.shares) if turn is not None else 0

    def told(self) -> list[float]:
        """What the other ranks need."""
        return [self.amount, sum(float(norm) for norm in self.mine)]

    def reading(self, told: Sequence[Sequence[float]]) -> NoiseReading | None:
        """From what all ranks have told; None where fewer than two had samples."""
        total = sum(amount for amount, _ in told)
        groups = [Group(weight=amount, squared_norm=norm * total**2) for amount, norm in told if amount > 0]
        if len(groups) < 2:
            return None
        whole = sum(float(norm) for norm in self.summed) * total**2
        return measure_noise([SegmentNorms(groups=groups, squared_norm=whole)], samples=self.samples)
