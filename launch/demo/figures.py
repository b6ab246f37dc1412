"""The demonstration's figures as a document, for ``--json`` and for benchmarks."""

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import encode
from arachne_runtime.units import Seconds

from .run import Demonstration


class TrainingFigures(Document, frozen=True, kw_only=True):
    """One of the three ways."""

    name: str
    step_s: Seconds
    samples_per_s: float
    predicted_step_s: Seconds | None = None
    losses: tuple[float, ...]


class DemoFigures(Document, frozen=True, kw_only=True):
    """Everything that ``arachne demo`` prints."""

    trainings: tuple[TrainingFigures, ...]
    ideal_step_s: Seconds
    speedup_over_even: float
    share_of_ideal: float
    prediction_error: float
    loss_gap: float


def figures(found: Demonstration) -> bytes:
    """Canonical JSON of the figures."""
    trainings = tuple(
        TrainingFigures(
            name=t.name,
            step_s=t.step_s,
            samples_per_s=t.samples_per_s,
            predicted_step_s=t.plan.predicted.iteration_s if t.plan and t.plan.predicted else None,
            losses=tuple(step.loss for step in t.steps),
        )
        for t in found.trainings
    )
    return encode(
        DemoFigures(
            trainings=trainings,
            ideal_step_s=found.ideal_s,
            speedup_over_even=found.speedup,
            share_of_ideal=found.share_of_ideal,
            prediction_error=found.prediction_error,
            loss_gap=found.loss_gap,
        )
    )
