"""How far two results may differ that are equal but for rounding."""

import torch

_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest rounding of a result, of its size, between two ways to compute it; for others see below."""
_HALF_TOLERANCE = 0.03
"""For dtypes of 16 bits: their epsilon is 0.0078 (bfloat16)."""


def tolerance_of(dtype: torch.dtype, device: torch.device | None = None) -> float:
    """Relative to the size of the result; on a device under autocast, by the dtype of its products."""
    tolerance = _TOLERANCES.get(dtype, _HALF_TOLERANCE)
    if device is not None and torch.is_autocast_enabled(device.type):
        return max(tolerance, tolerance_of(torch.get_autocast_dtype(device.type)))
    return tolerance
