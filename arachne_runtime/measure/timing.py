"""Times work as a training step meets it: the mean over batches of repeats that span many quota periods.

Under a CPU quota a short call is seldom throttled, so the median of short calls is the time of a device
without a quota; only the mean over many periods is the time that training sees. Three more things make it
wrong by some percent (docs/measuring.md): a batch that begins after a pause finds a full quota; one that ends
as soon as enough time has passed ends behind a throttle more often than chance has it; a machine's speed
drifts while it is measured. So ranks do not pause, the repeats of a batch are counted out before it begins,
and all pieces of work are timed in turn, round after round.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from ..errors import UsageError
from ..units import Seconds
from .together import Together

Phases: TypeAlias = Sequence[Callable[[], object]]
"""What one repeat does, in parts that are told apart: say forward, then backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure each piece of work."""

    batch_s: Seconds = 0.15
    """A batch of repeats lasts about this long: 15 periods of a 10 ms quota."""
    rounds: int = 7
    """Batches of each piece of work, of which the median counts."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.batch_s <= 0:
            raise UsageError(f"effort needs rounds >= 1 and batch_s > 0, got {self}")


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


@dataclass(slots=True)
class _Piece:
    """A piece of work, and what its batches took."""

    prepare: Callable[[], Phases]
    repeats: int = 1
    """Of the next batch; never changed by the batch itself."""
    batches: list[tuple[Seconds, ...]] = field(default_factory=list)

    def time(self, device: torch.device, batch_s: Seconds) -> None:
        """Add one batch."""
        self.batches.append(_batch(self.prepare(), device, self.repeats))
        self.repeats = self._enough(batch_s)

    def warm_up(self, device: torch.device, batch_s: Seconds) -> None:
        """Allocate, compile, and find how many repeats fill a batch."""
        took_s = 0.0
        while took_s < batch_s / 4:
            phases = self.prepare()
            self.batches = [_batch(phases, device, self.repeats)]
            took_s = self.repeats * self.seconds
            self.repeats = min(4 * self.repeats, self._enough(batch_s))
        self.batches = []

    @property
    def seconds(self) -> Seconds:
        """Of the last repeat, all phases."""
        return sum(self.batches[-1])

    @property
    def medians(self) -> tuple[Seconds, ...]:
        """By phase."""
        return tuple(statistics.median(times) for times in zip(*self.batches, strict=True))

    def _enough(self, batch_s: Seconds) -> int:
        return max(1, round(batch_s / max(self.seconds, 1e-9)))


def seconds_in_turn(
    works: Sequence[Callable[[], Phases]],
    *,
    device: torch.device,
    together: Together,
    effort: Effort = DEFAULT_EFFORT,
    on_batch: Callable[[int, int], None] | None = None,
) -> tuple[tuple[Seconds, ...], ...]:
    """Seconds of each phase of a repeat of each of the works, all ranks measuring at once.

    Each of ``works`` makes ready what its phases need, which is not timed, and returns the phases. A batch's
    wall time is divided by its repeats, then split between the phases by their CPU time (on CUDA, by the
    device's clock). Before each batch ``on_batch(index of the work, batches left)`` is called. Every rank
    passes equally many works; one that is through with a round works on until all are.
    """
    pieces = [_Piece(prepare) for prepare in works]
    together.barrier()
    left = len(pieces) * (effort.rounds + 1)
    for turn in range(effort.rounds + 1):
        for index, piece in enumerate(pieces):
            left -= 1
            if on_batch:
                on_batch(index, left)
            if turn:
                piece.time(device, effort.batch_s)
            else:
                piece.warm_up(device, effort.batch_s)
        if pieces:
            together.work_until_all_are_here(lambda: _batch(pieces[0].prepare(), device, 1))
    return tuple(piece.medians for piece in pieces)


def seconds_by_phase(
    phases: Phases, *, device: torch.device, together: Together, effort: Effort = DEFAULT_EFFORT
) -> tuple[Seconds, ...]:
    """Seconds of each phase of a repeat of one piece of work."""
    (seconds,) = seconds_in_turn((lambda: phases,), device=device, together=together, effort=effort)
    return seconds


def _batch(phases: Phases, device: torch.device, repeats: int) -> tuple[Seconds, ...]:
    """Seconds of each phase of a repeat.

    The clock that a lap reads also ends what the kernel calls a slice, and a rank that has used up its quota
    is stopped there. A lap comes first at both ends of the batch, so that each batch pays for itself alone.
    """
    laps: _Laps = _CudaLaps(device) if device.type == "cuda" else _CpuLaps()
    _finish(device)
    laps.lap()
    start = time.perf_counter()
    for _ in range(repeats):
        for phase in phases:
            phase()
            laps.lap()
    _finish(device)
    wall_s = time.perf_counter() - start
    spent = laps.spent()
    by_phase = [sum(spent[i :: len(phases)]) for i in range(len(phases))]
    return tuple(wall_s / repeats * part / max(sum(by_phase), 1e-12) for part in by_phase)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
