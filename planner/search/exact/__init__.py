"""The best plan of a small problem, proven while the search runs: branch and bound over columns."""

from .branch_and_bound import Exact
from .columns import num_shapes
from .pools import find_pools

__all__ = ["Exact", "find_pools", "num_shapes"]
