"""Sizes that the engine keeps to and the price counts with."""

from ..units import Bytes

BUCKET_BYTES: Bytes = 25 * 2**20
"""A bucket of gradients is closed at this size, DDP's default: one is summed while the next is packed."""

PENDING_SENDS = 4
"""Gradient sends that may be under way before the oldest is waited for, which frees its memory."""
