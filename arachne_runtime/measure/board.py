"""Scalars for TensorBoard, one set a step, written by rank 0: ``pip install 'arachne-hetero[tensorboard]'``.

    train/loss, train/grad_norm, speed/samples_per_s, speed/step_s, waiting/pipeline-0-stage-1

Waiting is the part of a step in which a stage waits for others, the mean of its ranks; all ranks tell it in
one small sum after each step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import UnsupportedEnvironmentError
from ..plan.placement import places
from ..plan.plan import Plan
from ..plan.records import RecordKind
from ..units import Bytes, Seconds
from .recorder import Held, Mark, Records, read_clock, seconds_between


class Finished(Protocol):
    """What is written of a step."""

    @property
    def step(self) -> int:
        """Steps done before this one."""
        ...

    @property
    def loss(self) -> float:
        """Of the global batch."""
        ...

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        ...

    @property
    def num_rows(self) -> int:
        """Of the global batch."""
        ...

    @property
    def seconds(self) -> Seconds:
        """Of the whole step."""
        ...


class Board:
    """Adds up what this rank waits, passes all on to other records, and writes when a step has finished."""

    def __init__(
        self, folder: Path, *, rank: int, plan: Plan, device: torch.device, records: Records
    ) -> None:
        """UnsupportedEnvironmentError, on every rank, where TensorBoard is not installed."""
        self._writer = _open_writer(folder, writes=rank == 0)
        self._records = records
        self._device = device
        self._num_ranks = len(plan.devices)
        everyone = [(place.pipeline, place.stage) for place in places(plan)]
        self._stages = sorted(set(everyone))
        self._width = [everyone.count(stage) for stage in self._stages]
        self._of_rank = {(p.pipeline, p.stage) for p in places(plan) if p.rank == rank}
        self._waits: list[tuple[Mark, Mark]] = []

    @contextmanager
    def step(self, number: int, *, samples: int, held: Held) -> Iterator[None]:
        """Forget the waits of the step before."""
        self._waits = []
        with self._records.step(number, samples=samples, held=held):
            yield

    def mark(self) -> Mark:
        """Read the clock."""
        return read_clock(self._device)

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """The first two marks of a piece are where it waited."""
        if kind is not RecordKind.COLLECTIVE:  # within an action, whose computing it is
            self._waits.append((marks[0], marks[1]))
        self._records.add(kind, name, marks, samples=samples, sent_bytes=sent_bytes)

    @contextmanager
    def timed(self, kind: RecordKind, name: str, *, sent_bytes: Bytes = 0) -> Iterator[None]:
        """All of the body is waiting."""
        start = self.mark()
        yield
        self.add(kind, name, (start, self.mark()), sent_bytes=sent_bytes)

    def write(self, report: Finished) -> None:
        """Write the scalars of a finished step; every rank calls it."""
        waiting = self._waiting(report.seconds)
        if self._writer is None:
            return
        scalars = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "speed/samples_per_s": report.num_rows / report.seconds,
            "speed/step_s": report.seconds,
        }
        scalars |= {f"waiting/pipeline-{p}-stage-{s}": part for (p, s), part in waiting.items()}
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, report.step)

    def close(self) -> None:
        """Write out what is left; what all was passed on to closes too."""
        self._records.close()
        if self._writer is not None:
            self._writer.close()

    def _waiting(self, whole_s: Seconds) -> dict[tuple[int, int], float]:
        """Part of the step that each stage waited, the mean of its ranks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        waited_s = sum(seconds_between(*marks) for marks in self._waits)
        mine = [waited_s / whole_s if stage in self._of_rank else 0.0 for stage in self._stages]
        parts = torch.tensor(mine, dtype=torch.float64, device=self._device)
        if self._num_ranks > 1:
            dist.all_reduce(parts)
        means = (part / width for part, width in zip(parts.tolist(), self._width, strict=True))
        return dict(zip(self._stages, means, strict=True))


def _open_writer(folder: Path, *, writes: bool) -> Any:
    """A ``SummaryWriter``; None on ranks that only need to know that they could have one."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedEnvironmentError(
            f"tensorboard={str(folder)!r} needs TensorBoard ({error}); pip install "
            "'arachne-hetero[tensorboard]', or leave the argument out"
        ) from error
    return SummaryWriter(str(folder)) if writes else None
