"""Times work as a training step meets it: the mean over a batch of repeats that spans many quota periods.

Under a CPU quota a short call is seldom throttled, so the median of short calls is the time of a device
without a quota; only the mean over many periods is the time that training sees.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import UsageError
from ..units import Seconds
from .together import Together


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure one piece of work."""

    batch_s: Seconds = 0.25
    """A batch of repeats lasts at least this long: 25 periods of a 10 ms quota."""
    min_batches: int = 3
    max_batches: int = 4
    enough: float = 0.03
    """Stop early when, on every rank, the middle batches agree within this part of their value."""
    warm_up_repeats: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_batches <= self.max_batches or self.batch_s <= 0:
            raise UsageError(f"effort needs 1 <= min_batches <= max_batches and batch_s > 0, got {self}")


DEFAULT_EFFORT = Effort()


class _Laps(Protocol):
    """Says which part of a batch each phase took; the whole is always wall time."""

    def lap(self) -> None: ...
    def spent(self) -> list[float]:
        """Amounts between consecutive laps, in any unit."""
        ...


class _CpuLaps:
    """Laps of this process's CPU time: a throttle falls on a phase by chance, CPU time does not."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def lap(self) -> None:
        self._times.append(time.process_time())

    def spent(self) -> list[float]:
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]


class _CudaLaps:
    """Laps of the device's own clock, so that kernels queue up as they do in training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def spent(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]


def seconds_by_phase(
    phases: Sequence[Callable[[], object]],
    *,
    device: torch.device,
    together: Together,
    effort: Effort = DEFAULT_EFFORT,
) -> tuple[Seconds, ...]:
    """Seconds of each phase of a repeat (say forward, then backward), all ranks measuring at once.

    Each batch's wall time is divided by its repeats, then split between the phases by their CPU time (on
    CUDA, by the device's clock); the result is the median of the batches.
    """
    slowest_s = together.largest(_warm_up(phases, device, effort.warm_up_repeats))
    batch_s = max(effort.batch_s, 2 * slowest_s)
    batches: list[tuple[Seconds, ...]] = []
    while len(batches) < effort.max_batches:
        together.barrier()
        batches.append(_batch(phases, device, batch_s))
        if len(batches) >= effort.min_batches and together.largest(_disagreement(batches)) <= effort.enough:
            break
    return tuple(statistics.median(times) for times in zip(*batches, strict=True))


def _warm_up(phases: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> Seconds:
    """Seconds of the last warm-up repeat."""
    last_s = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        for phase in phases:
            phase()
        _finish(device)
        last_s = time.perf_counter() - start
    return last_s


def _batch(
    phases: Sequence[Callable[[], object]], device: torch.device, batch_s: Seconds
) -> tuple[Seconds, ...]:
    laps: _Laps = _CudaLaps(device) if device.type == "cuda" else _CpuLaps()
    _finish(device)
    start = time.perf_counter()
    laps.lap()
    repeats = 0
    while not repeats or time.perf_counter() - start < batch_s:
        for phase in phases:
            phase()
            laps.lap()
        repeats += 1
    _finish(device)
    wall_s = time.perf_counter() - start
    spent = laps.spent()
    by_phase = [sum(spent[i :: len(phases)]) for i in range(len(phases))]
    return tuple(wall_s / repeats * part / max(sum(by_phase), 1e-12) for part in by_phase)


def _disagreement(batches: Sequence[tuple[Seconds, ...]]) -> float:
    """Distance between the batches beside the median, as a part of the median (totals of all phases)."""
    totals = sorted(sum(batch) for batch in batches)
    middle = len(totals) // 2
    near = totals[max(0, middle - 1) : middle + 2]
    return (near[-1] - near[0]) / max(totals[middle], 1e-12)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
