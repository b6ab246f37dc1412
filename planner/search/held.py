"""How many micro-batches every run of blocks can keep in flight within a device's memory."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.units import Bytes

from ..cost import Tables, stage_memory

MOST_HELD = 1 << 30
"""Micro-batches in flight where nothing that they hold takes memory."""

FAR = 1 << 14
"""Micro-batches in flight beyond which each one more takes as many bytes as the one before."""


def most_held(
    tables: Tables,
    *,
    device: str,
    tp: int,
    samples: int,
    room_bytes: Bytes,
    recompute: bool,
    zero: int = 0,
    width: int = 1,
) -> NDArray[np.int64]:
    """``[start, stop]``, 0 where none fits. Beyond the optimizer's phase memory is a line in what is held.

    ``room_bytes``: memory of the device without the reserve.
    """
    size = tables.num_blocks + 1
    starts, stops = (np.asarray(x, np.int64) for x in np.triu_indices(size, 1))

    def peak(held: int | NDArray[np.int64]) -> NDArray[np.float64]:
        memory = stage_memory(
            tables,
            start=starts,
            stop=stops,
            device=device,
            tp=tp,
            samples=samples,
            held=held,
            recompute=recompute,
            zero=zero,
            width=width,
        )
        return np.asarray(memory.totals, float)

    most = _most(peak, room_bytes)
    table = np.zeros((size, size), np.int64)
    table[starts, stops] = np.where(peak(0) <= room_bytes, most, 0)
    return table


def _most(
    peak: Callable[[int | NDArray[np.int64]], NDArray[np.float64]], room_bytes: Bytes
) -> NDArray[np.int64]:
    """Where the line of the bytes crosses the room; set right by one, as bytes are rounded."""
    far, further = peak(FAR), peak(2 * FAR)
    each = (further - far) / FAR
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = np.where(each > 0, FAR + (room_bytes - far) / each, np.where(far <= room_bytes, np.inf, 0))
    most = np.asarray(np.clip(np.floor(crossing), 0, MOST_HELD), np.int64)
    most = np.where(peak(most) <= room_bytes, most, np.maximum(most - 1, 0))
    return np.where(peak(most + 1) <= room_bytes, np.minimum(most + 1, MOST_HELD), most)
