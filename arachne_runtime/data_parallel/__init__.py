"""Data parallelism with unequal shares, for models that fit on one device: two lines of a DDP script."""

from .loader import HeteroLoader
from .model import HeteroDDP

__all__ = ["HeteroDDP", "HeteroLoader"]
