"""Writes down how long each piece of a rank's step took, and its peak of memory: JSON lines, one file a rank.

During a step only clock readings are kept; they become records, and reach the file, when the step has
ended. On CUDA the readings are events, so that nothing waits for the device, and the allocator tells every
step's peak. On a CPU each operation must be looked at to find it, so only a few steps are weighed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import IO, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor

from ..plan.files import digest
from ..plan.plan import Plan
from ..plan.records import Record, RecordKind
from ..units import Bytes, Seconds
from .collectives import recorded_by
from .live import Peak, peak_of

Held: TypeAlias = Callable[[], Iterable[Tensor]]
"""Gives the tensors that a rank keeps from step to step."""
Mark: TypeAlias = "float | torch.cuda.Event"
"""One reading of a clock."""


@dataclass(slots=True)
class _Entry:
    """One record before its times are known."""

    kind: RecordKind
    name: str
    marks: Sequence[Mark]
    """Start, input there, computed, sent."""
    samples: int
    sent_bytes: Bytes
    within: str = ""
    peak_bytes: Bytes = 0


class Records(Protocol):
    """What the engine tells its times to."""

    def step(self, number: int, *, samples: int, held: Held) -> AbstractContextManager[None]:
        """Record the step in the body, of so many rows; one that fails is dropped."""
        ...

    def mark(self) -> Mark:
        """Read the clock."""
        ...

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """One piece has ended. ``marks``: start, input there, computed, sent."""
        ...

    def timed(self, kind: RecordKind, name: str, *, sent_bytes: Bytes = 0) -> AbstractContextManager[None]:
        """Record the body, all of it as waiting."""
        ...

    def close(self) -> None:
        """The engine that told it has ended."""
        ...


class Silence:
    """Records nothing."""

    def step(self, number: int, *, samples: int, held: Held) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def mark(self) -> Mark:
        """No reading."""
        return 0.0

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """Nothing."""

    def timed(self, kind: RecordKind, name: str, *, sent_bytes: Bytes = 0) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def close(self) -> None:
        """Nothing."""


def is_weighed(step: int) -> bool:
    """Steps whose peak of memory is found on a CPU: 0, 1, 16, 64, 256, ...

    Counting took 33 to 39 % more CPU time of blocks 256 and 512 wide (2 cores of an EPYC, 2026-11-30). The
    first two are warm-up and hold the peaks: step 0 that of gradients as autograd makes them, step 1 that of
    a step with optimizer states.
    """
    return step < 2 or (step >= 16 and step & (step - 1) == 0 and step.bit_length() % 2 == 1)


class Recorder:
    """Records of one rank, appended to ``DIR/rank-<r>.jsonl``; close it, or use it as a context manager."""

    def __init__(self, directory: Path, *, rank: int, plan: Plan, device: torch.device | None = None) -> None:
        """Open the file of ``rank``; the directory is made where it does not exist."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(directory / f"rank-{rank}.jsonl", "ab")  # noqa: SIM115 - closed by close()
        self._rank = rank
        self._plan = digest(plan)
        self._device = device or torch.device("cpu")
        self._cuda = self._device.type == "cuda"
        self._encoder = msgspec.json.Encoder()
        self._entries: list[_Entry] = []
        self._unplaced: list[_Entry] = []
        """Collectives of the action under way."""
        self._step = 0
        self._start: Mark = 0.0

    @contextmanager
    def step(self, number: int, *, samples: int, held: Held) -> Iterator[None]:
        """Record the step in the body; one that fails is dropped."""
        self._begin(number)
        weighed = self._cuda or is_weighed(number)
        with recorded_by(self), peak_of(self._device, held) if weighed else nullcontext() as peak:
            yield
        self._end(samples, peak)

    def mark(self) -> Mark:
        """Now: seconds on the host, or an event on the current CUDA stream."""
        return read_clock(self._device)

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """Keep one piece of the step."""
        entry = _Entry(kind, name, marks, samples, sent_bytes)
        self._entries.append(entry)
        if kind is RecordKind.COLLECTIVE:
            self._unplaced.append(entry)
        elif kind is RecordKind.ACTION and self._unplaced:
            for inner in self._unplaced:
                inner.within = name
            self._unplaced = []

    @contextmanager
    def timed(self, kind: RecordKind, name: str, *, sent_bytes: Bytes = 0) -> Iterator[None]:
        """Record the body, all of it as waiting."""
        start = self.mark()
        yield
        self.add(kind, name, (start, self.mark()), sent_bytes=sent_bytes)

    def _begin(self, step: int) -> None:
        """Start the clock of a step; whatever an aborted step left is dropped."""
        self._step = step
        self._entries.clear()
        self._unplaced = []
        self._start = self.mark()

    def _end(self, samples: int, peak: Peak | None) -> None:
        """Write the records of the step."""
        now = self.mark()
        if self._cuda:
            torch.cuda.synchronize()
        if peak is not None:
            at = (self._start, self._start)
            self._entries.append(_Entry(RecordKind.MEMORY, "memory", at, 0, 0, peak_bytes=peak.bytes))
        self.add(RecordKind.STEP, "step", (self._start, self._start, now), samples=samples)
        for entry in self._entries:
            self._file.write(self._encoder.encode(self._record(entry)) + b"\n")
        self._file.flush()
        self._entries.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, entry: _Entry) -> Record:
        at = [seconds_between(self._start, mark) for mark in entry.marks]
        parts = [b - a for a, b in pairwise(at)] + [0.0] * (4 - len(at))
        wait_s, compute_s, transfer_s = parts
        return Record(
            kind=entry.kind,
            name=entry.name,
            rank=self._rank,
            step=self._step,
            plan=self._plan,
            start_s=at[0],
            wait_s=wait_s,
            compute_s=compute_s,
            transfer_s=transfer_s,
            samples=entry.samples,
            sent_bytes=entry.sent_bytes,
            within=entry.within,
            peak_bytes=entry.peak_bytes,
        )


def read_clock(device: torch.device) -> Mark:
    """Now: seconds on the host, or an event on the current CUDA stream."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> Seconds:
    """Of two readings of one clock."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1e3  # type: ignore[no-any-return]
