"""Books of a simulated job: steps done, and what every second went into."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from arachne_runtime.units import Seconds

from .pace import Pace


class Spent(StrEnum):
    """What seconds go into; all of them add up to the duration."""

    TRAINING = "training"
    """Steps that count."""
    COPYING = "copying"
    """Their delay by snapshots and checkpoints."""
    REDONE = "redone"
    """Steps, whole or begun, that a loss undid."""
    STANDSTILL = "standstill"
    """Detection, planning after a loss, forming anew, bytes that move, restarts."""
    WAITING = "waiting"
    """For devices: no plan fits those that are there."""


@dataclass(slots=True)
class Stretch:
    """Steps in a row under one pace."""

    first: float
    last: float
    pace: Pace


@dataclass(slots=True)
class Ledger:
    """Of one job."""

    global_batch: int
    steps: float = 0.0
    spent_s: dict[Spent, Seconds] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    curve: list[tuple[Seconds, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    """Time and samples: straight between two points, downwards where steps are undone."""
    _done: list[Stretch] = field(default_factory=list)

    @property
    def samples(self) -> float:
        """Of all steps that count."""
        return self.steps * self.global_batch

    def train(self, from_s: Seconds, to_s: Seconds, pace: Pace) -> None:
        """Training all the time; a step that is not whole at the end counts in part."""
        self.mark(from_s)
        more = (to_s - from_s) / pace.whole_step_s
        self._done.append(Stretch(self.steps, self.steps + more, pace))
        self.steps += more
        self.spent_s[Spent.TRAINING] += more * pace.step_s
        self.spent_s[Spent.COPYING] += more * pace.copying_s
        self.mark(to_s)

    def stand(self, from_s: Seconds, to_s: Seconds, what: Spent) -> None:
        """No training."""
        self.spent_s[what] += to_s - from_s

    def back_to(self, step: float, at_s: Seconds) -> None:
        """Undo all steps behind ``step``: the time that they took was for nothing."""
        for count, pace in self._undone(step):
            self.spent_s[Spent.TRAINING] -= count * pace.step_s
            self.spent_s[Spent.COPYING] -= count * pace.copying_s
            self.spent_s[Spent.REDONE] += count * pace.whole_step_s
        self.steps = min(self.steps, step)
        self.mark(at_s)

    def _undone(self, step: float) -> Iterator[tuple[float, Pace]]:
        while self._done and self._done[-1].last > step:
            stretch = self._done.pop()
            if stretch.first < step:
                self._done.append(Stretch(stretch.first, step, stretch.pace))
            yield stretch.last - max(step, stretch.first), stretch.pace

    def mark(self, at_s: Seconds) -> None:
        """A point of the curve."""
        if self.curve[-1] != (at_s, self.samples):
            self.curve.append((at_s, self.samples))
