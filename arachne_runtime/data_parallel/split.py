"""An optimizer whose states are split over the ranks of a HeteroDDP, by DeepSpeed's ZeRO-1."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from ..backends.split_states import SplitStates
from ..errors import UnsupportedPlanError, UsageError

if TYPE_CHECKING:
    from .model import HeteroDDP


def split_optimizer(model: "HeteroDDP", optimizer: Optimizer, *, zero: int = 1) -> Optimizer:
    """Split the states of ``optimizer`` over the ranks of ``model``; all call it, before the first step.

        optimizer = arachne.split_optimizer(model, torch.optim.AdamW(model.parameters()))

    What it returns stands for the optimizer: schedules, GradScaler, clipping and ``loader.step`` take it.
    Each step is that of the whole optimizer, to the bit. Use the one passed in no more; a lone process gets
    it back as it is.

    Args:
        model: Sums the gradients.
        optimizer: Of parameters of ``model``, without states yet; one of the SGD or Adam families.
        zero: The stage of ZeRO. Only 1 is exact here.

    Raises:
        UsageError: A parameter is not the model's.
        UnsupportedPlanError: ZeRO-2 or 3; parameters or an optimizer that cannot be split.
        UnsupportedEnvironmentError: DeepSpeed is missing.

    """
    if zero != 1:
        raise UnsupportedPlanError(
            f"zero={zero}: HeteroDDP sums whole gradients, since it weighs them in its buckets and joins the "
            "sums of a step that failed, so that only the states can be split (zero=1); a plan with one "
            "stage and zero 2 or 3 splits more, with unequal shares too (arachne.Session)"
        )
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    for group in optimizer.param_groups:
        if strange := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            raise UsageError(
                f"the optimizer has a parameter of shape {strange[0]} that is not the model's, so no rank "
                "sums its gradient; make the optimizer from model.parameters()"
            )
    return optimizer if model.peers.num_ranks == 1 else SplitOptimizer(model, optimizer)


class SplitOptimizer(Optimizer):
    """Looks like the whole optimizer, with its parameters and settings; holds one part of its states."""

    def __init__(self, model: "HeteroDDP", optimizer: Optimizer) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        group = model.peers.group
        assert group is not None
        named = [*model.module.named_parameters()]
        self._backend = SplitStates.of(named, optimizer, group, model.device)
        self.whole_type = type(optimizer)
        """Of the optimizer that was split."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part, then hand round the parameters; all ranks call it together.

        Raises:
            UnsupportedPlanError: A parameter has a gradient in some steps only, where steps count.
            UsageError: The model was moved or converted since.

        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, held in zip(self.param_groups, self._backend.optimizer.param_groups, strict=True):
            held.update({key: value for key, value in mine.items() if key != "params"})
        self._backend.take_parameters()
        self._backend.step()
        return loss

    def whole_state_dict(self) -> dict[str, Any]:
        """What the whole optimizer's ``state_dict`` would be, on every rank; all call it together."""
        found: dict[str, Any] = super().state_dict()
        states = self._backend.whole_states()
        parameters = [p for group in self.param_groups for p in group["params"]]
        found["state"] = {i: states[id(p)] for i, p in enumerate(parameters) if id(p) in states}
        return found

    def state_dict(self) -> NoReturn:
        """Scripts call it on one rank, which has a part only.

        Raises:
            UsageError: Always.

        """
        raise UsageError(
            "the states of a split optimizer are in parts, one on each rank; call whole_state_dict() on all "
            "ranks, and save what one of them gets"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the ``state_dict`` of a whole optimizer; every rank loads the same.

        Raises:
            UnsupportedPlanError: Parameters of one group have taken unlike numbers of steps.

        """
        super().load_state_dict(state_dict)
        self._backend.take_states({id(parameter): state for parameter, state in self.state.items()})
        self.state.clear()

    def close(self) -> None:
        """Let DeepSpeed go; it cannot step any more."""
        self._backend.close()
