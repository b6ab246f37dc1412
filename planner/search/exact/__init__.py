"""The best plan of a small problem, proven while the search runs: branch and bound over columns."""

from .branch_and_bound import Exact
from .columns import num_shapes
from .pools import Pools, find_pools, seatings

__all__ = ["Exact", "Pools", "find_pools", "num_shapes", "seatings"]
