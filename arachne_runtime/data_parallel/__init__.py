"""Data parallelism with unequal shares, for models that fit on one device: two lines of a DDP script."""

from .adaptive import AdaptiveBatch
from .evaluate import evaluate
from .loader import HeteroLoader
from .model import HeteroDDP
from .norm import convert_batch_norm
from .split import split_optimizer

__all__ = ["AdaptiveBatch", "HeteroDDP", "HeteroLoader", "convert_batch_norm", "evaluate", "split_optimizer"]
