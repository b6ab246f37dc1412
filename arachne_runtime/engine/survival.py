"""What an engine hands its steps to in a job that outlives its ranks; it knows no coordinator, no record."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from .report import EvaluationReport, StepReport

if TYPE_CHECKING:
    from .engine import Engine


class Survival(Protocol):
    """Repeats what a lost rank has cut short, in a new generation of ranks."""

    @property
    def generation(self) -> int:
        """Of the groups that the engine communicates in."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether that generation is over: what waits for others may wait for ever."""
        ...

    def step(self, engine: "Engine", batch: Any) -> StepReport:
        """As ``Engine.step``, in as many tries as it takes."""
        ...

    def evaluate(self, engine: "Engine", batches: Iterable[Any]) -> EvaluationReport:
        """As ``Engine.evaluate``, likewise."""
        ...
