"""What a step tells its caller."""

import math
from dataclasses import dataclass

from ..batch import NoiseReading
from ..units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step; equal on every rank, but for the seconds."""

    step: int
    """Steps done before this one."""
    loss: float
    """Mean over the whole global batch (over its items, where ``num_items`` counts them)."""
    grad_norm: float
    """Global 2-norm of the summed gradients before clipping, each parameter counted once; with a loss scale,
    of what they are without it."""
    num_rows: int
    num_items: int
    """Items of the global batch: the rows, where ``num_items`` is not given."""
    seconds: Seconds
    skipped: bool = False
    """In float16 gradients overflowed, so that parameters and learning rate stayed as they were."""
    loss_scale: float = 1.0
    """Factor of the losses of this step; 1 but for float16."""
    noise: NoiseReading | None = None
    """Of the gradients, seen between replicas and pipelines; None: not asked for, or too short a batch."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite; in float16 a few steps are not, and were skipped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Losses of some batches without training on them; equal on every rank, but for the seconds."""

    loss: float
    """Mean over all samples (over all items, where ``num_items`` counts them)."""
    num_samples: int
    num_items: int
    """The samples, where ``num_items`` is not given."""
    num_batches: int
    """Those with samples."""
    seconds: Seconds
