"""One figure, or one for each of many stages, under the same arithmetic."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Amount: TypeAlias = float | NDArray[Any]
"""One figure, or one for each of many stages."""
Bound: TypeAlias = int | NDArray[Any]
"""A boundary of blocks, or one for each of many stages."""


def larger(a: Amount, b: Amount) -> Amount:
    """``max``; NumPy's where one is an array, as it is slow for plain numbers."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)
