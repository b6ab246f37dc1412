"""What the engine asks of whatever holds the optimizer of a rank, and the plain answer: torch's, whole."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError
from ..model import StageModule
from ..plan.order import Reduction
from ..units import Bytes


class GradientSums(Protocol):
    """The gradients of one rank and their sums: the engine's, or a backend's that sums as it splits."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those whose gradients it leaves in ``.grad``."""
        ...

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        ...

    def enter(self) -> None:
        """A backward begins."""
        ...

    def settle(self, sent: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """A backward has ended; what may be sent in place of ``sent``."""
        ...

    def passed(self, blocks: range) -> None:
        """The last backward of the step has passed ``blocks``."""
        ...

    def pieces(self, stage: StageModule) -> tuple[range, ...]:
        """Runs of blocks of a stage, ascending, behind each of which a sum with other ranks may start."""
        ...

    def start(self, reduction: Reduction) -> bool:
        """Start a sum, if its gradients are complete."""
        ...

    def finish(self, reduction: Reduction) -> None:
        """Wait for a sum."""
        ...

    def bytes_of(self, reduction: Reduction) -> Bytes:
        """Bytes of a sum."""
        ...

    def squared_norm(self) -> float:
        """Sum of squares over what this rank counts, after all sums."""
        ...

    def clip(self, norm: float, limit: float) -> None:
        """Scale down by ``limit / norm`` where the norm is above the limit."""
        ...

    def kept(self) -> Iterator[Tensor]:
        """The tensors that hold gradients between steps."""
        ...

    def close(self) -> None:
        """Let go of the groups."""
        ...


@dataclass(frozen=True, slots=True)
class StateRun:
    """Where the optimizer keeps the states of some elements of a parameter."""

    parameter: nn.Parameter
    elements: range
    """Of the parameter, counted row by row."""
    stepped: Tensor
    """What the optimizer steps: the parameter itself, or a flat tensor with parts of several."""
    inside: slice | None = None
    """Where the elements are in it; None: it is the parameter."""
    is_trained: bool = True
    """Whether it ever had a gradient; without one it has no states but zeros that stand in a flat tensor."""


class OptimizerBackend(Protocol):
    """Holds the optimizer of one rank and takes its steps."""

    @property
    def sums(self) -> GradientSums | None:
        """What sums the gradients in the engine's place."""
        ...

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

    def runs(self) -> Iterator[StateRun]:
        """Which elements of its parameters this rank has states of, and where.

        Raises:
            UnsupportedPlanError: They are kept in a way that nothing here reads.

        """
        ...

    def set_trained(self, trained: Collection[nn.Parameter]) -> None:
        """The states are now, of this and other ranks, those of these parameters."""
        ...

    def take_parameters(self) -> None:
        """Step from the parameters as they are now: others have written them in place."""
        ...

    def close(self) -> None:
        """Let go of process groups and hooks; it cannot step any more."""
        ...


class WholeStates:
    """torch's optimizer on the whole parameters of a rank."""

    sums: GradientSums | None = None

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

    def runs(self) -> Iterator[StateRun]:
        """All elements of every parameter."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                yield StateRun(p, range(p.numel()), p, is_trained=bool(self.optimizer.state.get(p)))

    def set_trained(self, trained: Collection[nn.Parameter]) -> None:
        """Those that have states say so."""

    def take_parameters(self) -> None:
        """There are no copies."""

    def close(self) -> None:
        """Nothing is held."""


def refuse_thawed(frozen: Sequence[nn.Parameter]) -> None:
    """UsageError where one of those that were frozen when the engine was made takes gradients now."""
    if thawed := [tuple(p.shape) for p in frozen if p.requires_grad]:
        raise UsageError(
            f"a parameter of shape {thawed[0]} was frozen when the engine was made, so no rank sums its "
            "gradient; make the engine with it trainable and freeze it afterwards, or make a new engine"
        )


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors of an optimizer's states."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
