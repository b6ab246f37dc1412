"""What a larger batch is worth: learning-rate rules, efficiency, progress in scale-invariant steps."""

import math
from dataclasses import dataclass
from enum import StrEnum

from ..errors import UsageError


class ScalingRule(StrEnum):
    """How the learning rate follows the batch; the factor is 1 at the base batch in all of them."""

    ADASCALE = "adascale"
    """The gain itself, for SGD (Johnson et al., arXiv 2007.05105)."""
    ADAMSCALE = "adamscale"
    """Square root of the gain, for Adam (AdaptDL's AdamScale, Qiao et al., OSDI 2021)."""
    SQUARE_ROOT = "square_root"
    """√(B / B₀), for Adam without a noise scale (Krizhevsky, arXiv 1404.5997)."""
    LINEAR = "linear"
    """B / B₀ (Goyal et al., arXiv 1706.02677)."""
    NONE = "none"


def gain(batch: int, *, base_batch: int, noise_scale: float) -> float:
    """Steps at the base batch that one step of ``batch`` samples is worth: (B/B₀)(φ + B₀)/(φ + B).

    AdaScale's gain r in terms of the noise scale φ (samples, may be infinite); between 1 and B/B₀.
    """
    if batch < 1 or base_batch < 1 or not noise_scale >= 0:
        raise UsageError(
            f"batch {batch}, base batch {base_batch}, noise scale {noise_scale}: batches are at least 1, "
            "a noise scale is at least 0"
        )
    return batch / base_batch * efficiency(batch, base_batch=base_batch, noise_scale=noise_scale)


def efficiency(batch: float, *, base_batch: int, noise_scale: float) -> float:
    """Progress of a sample against one in a base batch: (φ + B₀)/(φ + B)."""
    return 1.0 if math.isinf(noise_scale) else (noise_scale + base_batch) / (noise_scale + batch)


def lr_factor(rule: ScalingRule, batch: int, *, base_batch: int, noise_scale: float) -> float:
    """What the base learning rate is multiplied by."""
    worth = gain(batch, base_batch=base_batch, noise_scale=noise_scale)
    return {
        ScalingRule.ADASCALE: worth,
        ScalingRule.ADAMSCALE: math.sqrt(worth),
        ScalingRule.SQUARE_ROOT: math.sqrt(batch / base_batch),
        ScalingRule.LINEAR: batch / base_batch,
        ScalingRule.NONE: 1.0,
    }[rule]


@dataclass(slots=True)
class Progress:
    """How far training is, in steps of the base batch: what learning-rate schedules are asked with."""

    base_batch: int
    steps: float = 0.0

    def add(self, batch: int, *, noise_scale: float) -> None:
        """One step of ``batch`` samples was taken; at the base batch it counts 1 for any noise scale."""
        self.steps += gain(batch, base_batch=self.base_batch, noise_scale=noise_scale)
