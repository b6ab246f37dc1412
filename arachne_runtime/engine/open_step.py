"""A step whose gradients are summed and whose optimizer step may still be to come."""

from dataclasses import dataclass

from ..data.batch import StepBatch
from ..errors import LostStateError
from ..units import Seconds
from .agreement import Same


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """What a rank holds of a step from the end of its sums until the sums of the next one begin."""

    number: int
    """Steps done before it."""
    batch: StepBatch
    count: int
    """Items of the global batch."""
    scale: float
    """Factor of its losses."""
    same: Same
    start_s: Seconds
    """On the process's clock."""
    generation: int
    """In which its gradients were summed; 0: the job is not elastic."""
    loss: float
    norm: float
    trace: float
    """Of the noise. The three are this rank's parts until the ranks have added them."""
    skipped: bool = False
    """Whether the parameters stay as they are, since float16 overflowed."""
    is_begun: bool = False
    """Whether its optimizer step has begun, which changes gradients in place: it is done once."""
    is_agreed: bool = False
    """Whether the commit word came back: all ranks hold their sums of this step."""
    wants_change: bool = False
    """Whether any rank wanted another plan, by that word."""

    @property
    def figures(self) -> tuple[float, float, float]:
        """Loss, norm and noise."""
        return self.loss, self.norm, self.trace

    def refuse_begun(self) -> None:
        """LostStateError where its optimizer step has begun and not ended: this rank has no step's state."""
        if self.is_begun:
            raise LostStateError(
                f"the optimizer step of step {self.number} failed in its middle on this rank; it cannot be "
                "done again; start from a checkpoint, or from the other ranks' state"
            )
