"""What the engine asks of whatever holds the optimizer of a rank, and the plain answer: torch's, whole."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch.optim import Optimizer


class OptimizerBackend(Protocol):
    """Holds the optimizer of one rank and takes its steps."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The one whose settings a learning-rate schedule changes; None without parameters.

        Its state may be that of a part of the parameters only.
        """
        ...

    def step(self) -> None:
        """Step the parameters by their gradients, which are summed and clipped; they stay readable."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every parameter of the stage can be read whole; all its ranks enter it together."""
        ...

    def close(self) -> None:
        """Let go of process groups and hooks; it cannot step any more."""
        ...


class WholeStates:
    """torch's optimizer on the whole parameters of a rank."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Step, where there is something to train."""
        if self.optimizer is not None:
            self.optimizer.step()

    def whole(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""
