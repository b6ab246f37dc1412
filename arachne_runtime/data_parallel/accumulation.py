"""Gradients of several backwards that one sum takes, though each has a weight of its own.

Autograd adds them up as they are. What is there is first divided by the weight of the backward that comes,
so that one weight is right for all; where that weight is zero it is put aside, since what comes may be no
number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Accumulation:
    """What this rank has added up since its last sum."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._weight: float | None = None
        """Of all that is kept; None: nothing is."""
        self._aside: list[Tensor | None] | None = None
        """What is kept, where the parameters do not hold it."""

    def begin(self, weight: float) -> None:
        """A backward begins, of this weight."""
        if weight == 0:
            if self._aside is None:
                self._aside = self._taken()
            return
        self._bring_back()
        if self._weight is not None:
            self._rescale(self._weight / weight)
        self._weight = weight

    def end(self, *, hidden: bool) -> None:
        """A backward has ended whose gradients stay here; ``hidden``: out of the user's sight."""
        if hidden:
            self._aside = self._aside if self._aside is not None else self._taken()
        else:
            self._bring_back()

    def source(self, place: int) -> Tensor | None:
        """The gradient of a parameter, to be weighed by ``factor``."""
        if self._aside is None:
            return self._parameters[place].grad
        return None if self._weight is None else self._aside[place]

    @property
    def factor(self) -> Tensor:
        """The weight of all gradients that the sum takes: a tensor, else one is made for each of them."""
        return torch.tensor(self._weight or 0.0, dtype=torch.float64)

    @property
    def is_empty(self) -> bool:
        """Whether the sum to come takes no earlier backward."""
        return self._weight is None

    def clear(self) -> None:
        """A sum has taken all."""
        self._weight, self._aside = None, None

    def _taken(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken

    def _bring_back(self) -> None:
        if self._aside is not None:
            for parameter, gradient in zip(self._parameters, self._aside, strict=True):
                parameter.grad = gradient
            self._aside = None

    def _rescale(self, factor: float) -> None:
        if factor != 1:
            kept = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            if kept:  # else the script gave them up
                torch._foreach_mul_(kept, factor)
