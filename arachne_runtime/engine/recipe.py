"""What a user says of a training, apart from its plan and its model; the same on every rank."""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..data.batch import default_inputs
from ..errors import UsageError
from ..plan.walk import said
from .compiled import backend_of
from .precision import Precision

Loss = Callable[[Any, Any], Tensor]
Inputs = Callable[[Any], tuple[Tensor, ...]]
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_FUNCTIONS = {
    "optimizer": "one that makes it from this rank's parameters: lambda p: torch.optim.AdamW(p, lr=3e-4)",
    "loss": "the mean over its samples: lambda output, batch: ...",
    "inputs": "what the first block is called with: lambda batch: (batch['tokens'],)",
    "lr_schedule": "one that makes it: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)",
    "num_items": "what counts the tokens of some samples: lambda batch: int((batch['labels'] >= 0).sum())",
}
"""What each is, for whoever passed something else."""


class Schedule(Protocol):
    """A learning-rate schedule of torch.optim.lr_scheduler."""

    def step(self) -> None:
        """Set the learning rates of the next step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained; UsageError for what would fail only in the middle of a step."""

    optimizer: Optimizers
    """Makes the optimizer from a rank's parameters. It must treat each parameter alone."""
    loss: Loss
    """``loss(output, batch)``, the mean over the samples it is given; a sum with ``num_items``."""
    inputs: Inputs = default_inputs
    """What the first block is called with, from samples of the batch."""
    clip_norm: float | None = None
    """Clip gradients to this global norm."""
    lr_schedule: Callable[[torch.optim.Optimizer], Schedule] | None = None
    """Makes a learning-rate schedule from the optimizer; it steps once a step."""
    num_items: Callable[[Any], int] | None = None
    """Counts the items (tokens) of some samples; the summed loss is divided by the global count."""
    seed: int = 0
    """First values of the parameters follow from it, whatever the plan."""
    dtype: torch.dtype | None = None
    """Of parameters and floating-point buffers; None: the model's own."""
    precision: Precision | None = None
    """What blocks and loss compute in, by autocast, while parameters and gradients stay float32."""
    accumulate: torch.dtype | None = None
    """What gradients of parameters of 16 bits are added in, over micro-batches and ranks; None: their own."""
    compile: bool | str = False
    """Whether blocks go through torch.compile, or the name of its backend."""
    stochastic: bool = False
    """Allow dropout, losses, buffers and optimizers that depend on how the plan splits the work."""

    def __post_init__(self) -> None:
        functions = {"optimizer": self.optimizer, "loss": self.loss, "inputs": self.inputs}
        optional = {"lr_schedule": self.lr_schedule, "num_items": self.num_items}
        functions |= {name: function for name, function in optional.items() if function is not None}
        for name, function in functions.items():
            if not callable(function):
                raise UsageError(f"{name}={said(function)} is no function; give {_FUNCTIONS[name]}")
        _refuse_trained(self.loss)
        refuse_no_integers(seed=self.seed)
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise UsageError(f"dtype={said(self.dtype)} is no dtype of torch; give one, like torch.bfloat16")
        self._refuse_dtypes()
        backend_of(self.compile)
        clip = self.clip_norm
        if clip is not None and (not isinstance(clip, int | float) or math.isnan(clip) or clip <= 0):
            raise UsageError(
                f"clip_norm={said(clip)} is no norm; give a number above 0, or None to clip none"
            )

    def _refuse_dtypes(self) -> None:
        if not isinstance(self.precision, Precision | None):
            raise UsageError(f"precision={said(self.precision)} is no Precision; use Precision.of(...)")
        if self.precision is not None and self.dtype not in (None, torch.float32):
            raise UsageError(
                f"precision={str(self.precision)!r} keeps parameters in float32, but dtype={self.dtype}; "
                "give precision= for float32 parameters under autocast, or dtype= for another one"
            )
        if self.accumulate not in (None, torch.float32, torch.float64):
            raise UsageError(
                f"accumulate={said(self.accumulate)} is no dtype to add gradients in; give torch.float32, or "
                "None to add them in the dtype of their parameters"
            )

    def common(self) -> tuple[object, ...]:
        """What ranks can compare of it."""
        dtypes = (self.dtype, self.precision, self.accumulate)
        return self.seed, dtypes, self.clip_norm, self.stochastic, self.num_items is None


def _refuse_trained(loss: Loss) -> None:
    """UsageError for a loss with parameters: no block holds them, so nothing would step them."""
    if isinstance(loss, nn.Module):
        trained = [name for name, p in loss.named_parameters() if p.requires_grad]
        if trained:
            names = ", ".join(trained)
            raise UsageError(
                f"loss={type(loss).__name__} has parameters of its own ({names}), which no stage holds and "
                "no optimizer would step; put them into the model's last block, or freeze them "
                "(requires_grad_(False))"
            )


def refuse_no_integers(**arguments: object) -> None:
    """UsageError for the first that is no whole number, say a text of the command line."""
    for name, value in arguments.items():
        try:
            operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f"{name}={said(value)} is no whole number; convert it: int(...)") from None
