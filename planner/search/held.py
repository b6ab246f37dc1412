"""How many micro-batches every run of blocks can keep in flight within a device's memory.

Worked out once for each run of equal blocks, and for all ways to save memory at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.units import Bytes

from ..cost import Tables, stage_memory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_HELD = 1 << 30
"""Micro-batches in flight where nothing that they hold takes memory."""

FAR = 1 << 14
"""Micro-batches in flight beyond which each one more takes as many bytes as the one before."""

ROUNDING = 1e-3
"""A count this near to a whole number is looked at again: bytes are rounded."""

MODULUS, BASE = (1 << 61) - 1, 1_000_003
"""Of the rolling hash: two different runs of a model are equal by chance once in 1e14 models."""


@dataclass(frozen=True, slots=True, order=True)
class Option:
    """What a stage may do to save memory, cheapest first."""

    recompute: bool
    zero: int


class Held:
    """Tables of one request: ``[start, stop]``, micro-batches that a replica can keep in flight."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        size = tables.num_blocks + 1
        starts, stops = np.triu_indices(size, 1)
        likeness = _Likeness(tables)
        first: dict[object, int] = {}
        self._class = np.zeros((size, size), np.int64)
        chosen: list[int] = []
        for at, (i, j) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            number = first.setdefault(likeness.key(i, j), len(first))
            if number == len(chosen):
                chosen.append(at)
            self._class[i, j] = number
        self._upper = np.triu(np.ones((size, size), bool), 1)
        self._starts, self._stops = starts[chosen], stops[chosen]

    def most(
        self,
        options: Sequence[Option],
        *,
        device: str,
        tp: int,
        samples: int,
        room_bytes: Bytes,
        width: int,
        tile: int = 1,
    ) -> list[Ints]:
        """One table for each option.

        ``room_bytes``: memory of the device without the reserve; ``tile``: EP x ETP.
        """
        recompute = np.array([o.recompute for o in options])[:, None]
        zero = np.array([o.zero for o in options])[:, None]

        def peak(held: Ints) -> Floats:
            memory = stage_memory(
                self.tables,
                start=self._starts,
                stop=self._stops,
                device=device,
                tp=tp,
                samples=samples,
                held=held,
                recompute=recompute,
                zero=zero,
                width=width,
                expert_parallel=tile,
            )
            return np.asarray(memory.totals, float)

        most = _most_within(peak, room_bytes)
        return [np.where(self._upper, row[self._class], 0) for row in most]


def _most_within(peak: Callable[[Ints], Floats], room_bytes: Bytes) -> Ints:
    """The most micro-batches in flight whose peak fits, from the line that peaks follow beyond ``FAR``."""
    none, far, further = peak(np.array([0, FAR, 2 * FAR])[:, None, None])
    each = (further - far) / FAR
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = np.where(each > 0, FAR + (room_bytes - far) / each, 0)
    crossing = np.where((each <= 0) & (far <= room_bytes), MOST_HELD, crossing)
    most = np.asarray(np.clip(np.floor(crossing), 0, MOST_HELD), np.int64)
    if (np.abs(crossing - np.round(crossing)) < ROUNDING).any():
        most = np.where(peak(most) <= room_bytes, most, np.maximum(most - 1, 0))
        most = np.where(peak(most + 1) <= room_bytes, np.minimum(most + 1, MOST_HELD), most)
    return np.where(none <= room_bytes, most, 0)


class _Likeness:
    """Equal keys for runs of blocks that take the same memory: equal sequences, by a rolling hash."""

    def __init__(self, tables: Tables) -> None:
        tied = {b for tie in tables.ties for b in tie.blocks}
        numbers: dict[object, int] = {}
        self.inputs = tables.input_bytes
        self.hashes, self.powers = [0], [1]
        for i, block in enumerate(tables.model.blocks):
            number = numbers.setdefault((i if i in tied else -1, block), len(numbers) + 1)
            self.hashes.append((self.hashes[-1] * BASE + number) % MODULUS)
            self.powers.append(self.powers[-1] * BASE % MODULUS)

    def key(self, start: int, stop: int) -> tuple[int, int, int, bool]:
        """Of blocks ``start..stop-1``."""
        length = stop - start
        value = (self.hashes[stop] - self.hashes[start] * self.powers[length]) % MODULUS
        return length, value, self.inputs[start], start == 0
