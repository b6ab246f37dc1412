"""What the engine asks of whatever holds the optimizer of a rank, and the plain answer: torch's, whole."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
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

    def kept(self) -> Iterator[Tensor]:
        """All that it holds from step to step beside parameters and gradients."""
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

    def kept(self) -> Iterator[Tensor]:
        """The states."""
        return iter(()) if self.optimizer is None else states_of(self.optimizer)

    def close(self) -> None:
        """Nothing is held."""


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors of an optimizer's states."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
