"""Peak bytes of a device under a plan: what it holds always, and the larger of its two phases.

Predicts high rather than low: an out-of-memory is worse than a plan a few percent slower.
"""

from dataclasses import dataclass

from arachne_runtime.plan.limits import PENDING_SENDS
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Bytes

from .tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one device of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Of all micro-batches in flight, their outputs included."""
    buffers: float
    """Received inputs and gradients, and what is being sent."""
    adoption: float
    """Gradients as autograd allocates them in the first backward, beyond the activations that it frees."""
    optimizer_temporaries: float
    """Adam's, after the last backward."""

    @property
    def total(self) -> Bytes:
        """The peak without the reserve of the device type."""
        held = self.weights + self.gradients + self.optimizer
        return (
            int(held + max(self.activations + self.buffers + self.adoption, self.optimizer_temporaries)) + 1
        )


def in_flight(kind: ScheduleKind, stage: int, num_stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at once."""
    if kind is ScheduleKind.GPIPE:
        return micro_batches
    return min(micro_batches, num_stages - stage)


def stage_memory(
    tables: Tables,
    *,
    start: int,
    stop: int,
    device: str,
    tp: int,
    samples: int,
    held: int,
    recompute: bool = False,
    zero: int = 0,
    width: int = 1,
) -> StageMemory:
    """Memory of a device of a replica that takes ``samples`` and has ``held`` micro-batches in flight.

    ``width``: the stage's replicas, among which ZeRO-1 divides the optimizer's states.
    """
    sizes = tables.model.bytes_per_parameter
    parameters = tables.parameters(start, stop) / tp
    entering = tables.input_bytes[start] * samples
    leaving = tables.output_bytes[stop - 1] * samples
    whole = tables.activations(start, stop, device, tp, samples)
    kept = held * entering + whole if recompute else held * whole
    gradients = parameters * sizes.gradient
    return StageMemory(
        weights=parameters * sizes.weight,
        gradients=gradients,
        optimizer=parameters * sizes.optimizer / (width if zero >= 1 else 1),
        activations=kept + held * leaving,
        buffers=_buffers(entering if start > 0 else 0, leaving),
        adoption=max(0.0, gradients - whole),
        optimizer_temporaries=parameters * sizes.weight,
    )


def _buffers(entering: Bytes, leaving: Bytes) -> float:
    """The gradient in use, the receive posted ahead, and gradients that are being sent."""
    return leaving + max(entering, leaving) + (PENDING_SENDS + 1) * entering
