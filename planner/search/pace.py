"""How much of some work to begin in the time that is left, by what it took before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from arachne_runtime.units import Seconds

FIXED_S: Seconds = 0.004
"""What a round takes however small it is: 3 to 5 ms of one core for the cases of bench/planning_time.py."""

PART = 0.5
"""Of the time left that a round may be expected to take: what comes may be slower than what was."""


@dataclass(slots=True)
class Pace:
    """Seconds of one kind of work that is done in rounds of some size."""

    clock: Callable[[], Seconds]
    each_s: Seconds = 0.0
    """Of one piece in the round before; 0 until there was one."""

    def most(self, left_s: Seconds) -> float:
        """The largest round to begin; ``inf`` until there was one."""
        return max(0.0, PART * left_s - FIXED_S) / self.each_s if self.each_s else float("inf")

    @contextmanager
    def timing(self, size: int) -> Iterator[None]:
        """A round of this size."""
        start_s = self.clock()
        yield
        self.each_s = max(1e-9, self.clock() - start_s - FIXED_S) / max(1, size)
