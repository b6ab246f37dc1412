"""How far two results may differ that are equal but for rounding."""

import torch

_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest rounding of a result, of its size, between two ways to compute it; for others see below."""
_HALF_TOLERANCE = 0.03
"""For dtypes of 16 bits: their epsilon is 0.0078 (bfloat16)."""


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative to the size of the result."""
    return _TOLERANCES.get(dtype, _HALF_TOLERANCE)
