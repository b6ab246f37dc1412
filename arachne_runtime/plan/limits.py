"""Sizes that the engine keeps to, the price counts with and the rules of a plan allow."""

from ..units import Bytes

BUCKET_BYTES: Bytes = 25 * 2**20
"""A bucket of gradients is closed at this size, DDP's default: one is summed while the next is packed."""

PENDING_SENDS = 4
"""Gradient sends that may be under way before the oldest is waited for, which frees its memory."""

MAX_MICRO_BATCHES = 2**16
"""Of a step, over all pipelines: every rank lists them, 4 stages in 5 s and 0.3 GB (measured on one core)."""
