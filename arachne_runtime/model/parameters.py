"""What is known of a parameter before it is allocated, and who may give its values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..plan.shards import ParameterForm, Part, Split

Values: TypeAlias = Callable[[ParameterForm, Part, torch.dtype], Tensor]
"""Gives the values of a part of a parameter, where the stage lives; the tensor becomes the parameter."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter of a block, as it will be."""

    name: str
    """Global name, ``blocks.<id>.<name in the block>``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    tie: str | None
    """Name of the tie, where other blocks hold it too."""
    splits: tuple[Split, ...] = ()
    """How ranks may share it."""
    partial: bool = False
    """Whether ranks that share others of its module each have a part of its gradient."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def form(self) -> ParameterForm:
        """What the plan must know of it."""
        return ParameterForm(
            self.name,
            self.shape,
            self.dtype.itemsize,
            self.requires_grad,
            self.tie,
            self.splits,
            self.partial,
        )
