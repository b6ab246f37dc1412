"""What a step tells its caller."""

import math
from dataclasses import dataclass

from ..units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step; equal on every rank, but for the seconds."""

    step: int
    """Steps done before this one."""
    loss: float
    """Mean over the whole global batch (over its items, where ``num_items`` counts them)."""
    grad_norm: float
    """Global 2-norm of the summed gradients before clipping, each parameter counted once."""
    num_rows: int
    num_items: int
    """Items of the global batch: the rows, where ``num_items`` is not given."""
    seconds: Seconds

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite; the optimizer has stepped either way, as in PyTorch."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)
