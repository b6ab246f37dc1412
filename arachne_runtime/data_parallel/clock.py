"""Times of a step on its device: host clock readings on a CPU, events on a GPU, which nothing waits for."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ..units import Seconds

Mark: TypeAlias = Any
"""One reading: what ``Clock.mark`` gave, of that clock only."""


class Clock(Protocol):
    """Reads the time of what a device does."""

    def mark(self) -> Mark:
        """Now: when all that was issued so far has ended."""
        ...

    def when_done(self, work: dist.Work) -> Mark:
        """When ``work`` has ended."""
        ...

    def between(self, start: Mark, end: Mark) -> Seconds | None:
        """Seconds; None: they are not over yet."""
        ...


@dataclass(slots=True)
class _End:
    """A reading that a callback takes."""

    at_s: Seconds | None = None

    def take(self, _: object) -> None:
        self.at_s = perf_counter()


class HostClock:
    """What a CPU has been asked to do is done when the call returns, but for collectives."""

    def mark(self) -> Mark:
        """A reading of the host's clock."""
        return _End(perf_counter())

    def when_done(self, work: dist.Work) -> Mark:
        """Read in the thread that ends the collective."""
        end = _End()
        work.get_future().add_done_callback(end.take)
        return end

    def between(self, start: Mark, end: Mark) -> Seconds | None:
        """Their difference."""
        return None if start.at_s is None or end.at_s is None else end.at_s - start.at_s


@dataclass(slots=True)
class CudaClock:
    """Events; the end of a collective is awaited by a stream of its own."""

    device: torch.device
    _side: Any = field(init=False)

    def __post_init__(self) -> None:
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """An event of the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def when_done(self, work: dist.Work) -> Mark:
        """An event behind the collective."""
        with torch.cuda.stream(self._side):
            work.wait()
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._side)
        return event

    def between(self, start: Mark, end: Mark) -> Seconds | None:
        """Milliseconds of the device, as seconds."""
        if not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
