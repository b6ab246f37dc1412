"""How many samples fit into a rank's memory: from the allocator's peaks, or from what did not fit."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..units import Bytes

_KEPT = 0.75
"""Part of a batch that is tried after the whole did not fit; two tries halve it."""
_USED = 0.9
"""Part of the memory that peaks may reach; a guess: the rest is for the context and for fragments."""
_WARMUP_STEPS = 2
"""Steps whose peaks do not count: the optimizer's states come with the first update."""


@dataclass(slots=True)
class MemoryWatch:
    """Learns a line, peak = fixed + rows × bytes a row, from steps of different numbers of rows."""

    peak: Callable[[], Bytes]
    """Of the step that has ended; the next peak is one of the next step."""
    limit: Bytes
    _peaks: dict[int, Bytes] = field(default_factory=dict)
    """The highest, by rows."""
    _num_steps: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "MemoryWatch | None":
        """By torch's allocator of a GPU, whose peak statistics are reset at every step; None for a CPU."""
        if device.type != "cuda":
            return None

        def peak() -> Bytes:
            found = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return found

        return cls(peak, torch.cuda.get_device_properties(device).total_memory)

    def observe(self, rows: int) -> None:
        """A step of so many rows has ended."""
        self._num_steps += 1
        found = self.peak()
        if self._num_steps > _WARMUP_STEPS and rows:
            self._peaks[rows] = max(found, self._peaks.get(rows, 0))

    def cap(self) -> int | None:
        """Rows that fit; None: steps did not differ enough to tell."""
        if len(self._peaks) < 2:
            return None
        low, high = min(self._peaks), max(self._peaks)
        rise = (self._peaks[high] - self._peaks[low]) / (high - low)
        return max(int(low + (_USED * self.limit - self._peaks[low]) / rise), 1) if rise > 0 else None


def fitting_rows(rows: int, watch: MemoryWatch | None) -> int:
    """Samples to try after ``rows`` did not fit; 0: there is nothing smaller."""
    if rows <= 1:
        return 0
    known = watch.cap() if watch is not None else None
    return max(min(int(rows * _KEPT), rows - 1, known or rows), 1)
