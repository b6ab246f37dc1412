"""Writes down how long each action, reduction and update of a rank took: JSON lines, one file a rank.

During a step only clock readings are kept; they become records, and reach the file, when the step has
ended. On CUDA the readings are events, so that nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import IO, Protocol, TypeAlias

import msgspec
import torch

from ..plan.files import digest
from ..plan.plan import Plan
from ..plan.records import Record, RecordKind
from ..units import Bytes, Seconds

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


class Records(Protocol):
    """What the engine tells its times to."""

    def begin(self, step: int) -> None:
        """A step begins."""
        ...

    def mark(self) -> Mark:
        """Read the clock."""
        ...

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """One piece has ended. ``marks``: start, input there, computed, sent."""
        ...

    def end(self, *, samples: int) -> None:
        """The step has ended; ``samples`` is the number of its rows."""
        ...


class Silence:
    """Records nothing."""

    def begin(self, step: int) -> None:
        """Nothing."""

    def mark(self) -> Mark:
        """No reading."""
        return 0.0

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """Nothing."""

    def end(self, *, samples: int) -> None:
        """Nothing."""


class Recorder:
    """Records of one rank, appended to ``DIR/rank-<r>.jsonl``; close it, or use it as a context manager."""

    def __init__(self, directory: Path, *, rank: int, plan: Plan, device: torch.device | None = None) -> None:
        """Open the file of ``rank``; the directory is made where it does not exist."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(directory / f"rank-{rank}.jsonl", "ab")  # noqa: SIM115 - closed by close()
        self._rank = rank
        self._plan = digest(plan)
        self._cuda = device is not None and device.type == "cuda"
        self._encoder = msgspec.json.Encoder()
        self._entries: list[_Entry] = []
        self._step = 0
        self._start: Mark = 0.0

    def begin(self, step: int) -> None:
        """Start the clock of a step; whatever an aborted step left is dropped."""
        self._step = step
        self._entries.clear()
        self._start = self.mark()

    def mark(self) -> Mark:
        """Now: seconds on the host, or an event on the current CUDA stream."""
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """Keep one piece of the step."""
        self._entries.append(_Entry(kind, name, marks, samples, sent_bytes))

    def end(self, *, samples: int) -> None:
        """Write the records of the step."""
        now = self.mark()
        if self._cuda:
            torch.cuda.synchronize()
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
        at = [_seconds(self._start, mark) for mark in entry.marks]
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
        )


def _seconds(start: Mark, end: Mark) -> Seconds:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1e3  # type: ignore[no-any-return]
