"""How many micro-batches every run of blocks can keep in flight within a device's memory."""

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.units import Bytes

from ..cost import Tables, stage_memory

MOST_HELD = 1 << 30
"""Micro-batches in flight where nothing that they hold takes memory."""


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
    """``[start, stop]``, 0 where none fits: memory is a constant and so much for each micro-batch in flight.

    ``room_bytes``: memory of the device without the reserve.
    """
    size = tables.num_blocks + 1
    starts, stops = (np.asarray(x, np.int64) for x in np.triu_indices(size, 1))
    none, one = (
        stage_memory(
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
        for held in (0, 1)
    )
    room = room_bytes - 1 - none.weights - none.gradients - none.optimizer
    each = np.asarray(one.activations - none.activations, float)
    free = np.asarray(room - none.activations - none.buffers - none.adoption, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(each > 0, np.floor(free / each), np.where(free >= 0, MOST_HELD, 0))
    fits = room >= none.optimizer_temporaries
    table = np.zeros((size, size), np.int64)
    table[starts, stops] = np.where(fits, np.clip(most, 0, MOST_HELD), 0)
    return table
