"""Where gradients are measured: by parameter group, as they are or divided as Adam divides its steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .split import SplitOptimizer

_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


@dataclass(frozen=True, slots=True)
class Space:
    """For each parameter of a model the optimizer that updates it, and its group among all groups.

    The divisors of Adam are those that the step is expected to have: they must not depend on its gradients.
    What no optimizer updates, or Adam has no state of yet, is not measured.
    """

    parameters: Sequence[nn.Parameter]
    optimizers: tuple[torch.optim.Optimizer, ...]
    """None: all parameters are one group, as they are."""
    num_groups: int
    homes: Sequence[tuple[int, torch.optim.Optimizer | None, dict[str, Any]] | None]
    """By parameter: number of its group, the optimizer if it is Adam, the group."""

    @classmethod
    def of(
        cls, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> "Space":
        """Groups are numbered through all optimizers, in their order.

        Raises:
            UsageError: The states of Adam are split over ranks.

        """
        for optimizer in optimizers:
            _refuse_split(optimizer)
        if not optimizers:
            return cls(parameters, (), 1, [(0, None, {})] * len(parameters))
        pairs = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        homes = {
            id(parameter): (number, optimizer if is_adam(optimizer) else None, group)
            for number, (optimizer, group) in enumerate(pairs)
            for parameter in group["params"]
        }
        return cls(parameters, tuple(optimizers), len(pairs), [homes.get(id(p)) for p in parameters])

    @property
    def is_plain(self) -> bool:
        """Whether all parameters are one group, as they are."""
        return not self.optimizers

    def is_of(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether it is the space of these, with the groups that they have now."""
        num_groups = sum(len(optimizer.param_groups) for optimizer in optimizers) or 1
        same = len(optimizers) == len(self.optimizers) and all(map(is_, optimizers, self.optimizers))
        return same and num_groups == self.num_groups

    def squared_norms(
        self, places: Sequence[int], gradients: Sequence[Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """(Group, squared norm in float64) of the gradients of some parameters of one dtype and device."""
        groups, scaled = [], []
        for place, gradient in zip(places, gradients, strict=True):
            home = self.homes[place]
            if home is None:
                continue
            number, adam, group = home
            if adam is not None:
                divisor = _divisor(adam, group, self.parameters[place])
                if divisor is None:
                    continue
                gradient = gradient / divisor
            groups.append(number)
            scaled.append(gradient)
        if scaled:
            norms = torch._foreach_norm(scaled, 2, torch.float64)
            yield from ((number, norm.square()) for number, norm in zip(groups, norms, strict=True))


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it divides by the root of a mean of squares that its state calls ``exp_avg_sq``."""
    return isinstance(optimizer, _ADAMS)


def _refuse_split(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, SplitOptimizer) and issubclass(optimizer.whole_type, _ADAMS):
        raise UsageError(
            "split_optimizer leaves each rank a part of Adam's means of squares, and noise is that of whole "
            "gradients divided by their roots; leave out split_optimizer, or the adaptive batch "
            "(measure_noise() without an optimizer measures gradients as they are)"
        )


def _divisor(adam: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> Tensor | None:
    """√v̂ + ε, as it is expected after the step: with the tensor's mean for the gradient's own square.

    The v before the step would divide by ε alone where there was no gradient yet, and the first ones of
    rare tokens would be all that is measured. None: there is no v yet.
    """
    state = adam.state.get(parameter)
    if not state:
        return None
    decay: float = group["betas"][1]
    before = state["exp_avg_sq"]
    steps = state["step"]  # stays on its device: no GPU is waited for
    typical = before.mean() / (1 - decay**steps)
    square = before * decay + typical * (1 - decay)
    if "max_exp_avg_sq" in state:
        square = torch.maximum(square, state["max_exp_avg_sq"])
    divisor: Tensor = (square / (1 - decay ** (steps + 1))).sqrt_().add_(group["eps"])
    return divisor
