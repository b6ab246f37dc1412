"""Sums what a rank computes in a step, without any wait for others; writes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import cast

from ..plan.records import RecordKind
from ..units import Bytes, Seconds
from .collectives import recorded_by
from .recorder import Held, Mark


class Computed:
    """Records that are one number; on the host's clock, hence for stages on the CPU."""

    def __init__(self) -> None:
        self.seconds: Seconds = 0.0
        """Of the last step that ended; 0: none did."""
        self._sum = 0.0

    @contextmanager
    def step(self, number: int, *, samples: int, held: Held) -> Iterator[None]:
        """Begin at nought; a step that fails counts for nothing."""
        self._sum = 0.0
        with recorded_by(self):
            yield
        self.seconds = max(self._sum, 0.0)

    def mark(self) -> Mark:
        """Read the clock."""
        return perf_counter()

    def add(
        self, kind: RecordKind, name: str, marks: Sequence[Mark], *, samples: int = 0, sent_bytes: Bytes = 0
    ) -> None:
        """Of actions and updates count what lies between input and result."""
        if kind in (RecordKind.ACTION, RecordKind.UPDATE):
            self._sum += cast(float, marks[2]) - cast(float, marks[1])

    @contextmanager
    def timed(self, kind: RecordKind, name: str, *, sent_bytes: Bytes = 0) -> Iterator[None]:
        """Take out the waits in the middle of an action."""
        start = perf_counter()
        yield
        if kind is RecordKind.COLLECTIVE:
            self._sum -= perf_counter() - start

    def close(self) -> None:
        """It goes on with the next engine."""
