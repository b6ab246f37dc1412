"""Numbers of 16 bits: what blocks compute in, what gradients are added in, the loss scale of float16."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from ..errors import UnsupportedEnvironmentError, UsageError
from ..plan.walk import said

FIRST_SCALE = 2.0**16
"""Factor of the first losses in float16; this and the three below are defaults of torch.amp.GradScaler."""
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_STEPS = 2000
"""Steps in a row with finite gradients before the scale grows."""
_LARGEST_SCALE = 2.0**127
"""GradScaler holds its scale in float32 and leaves it where it would grow to infinity."""
_SMALLEST_SCALE = 2.0**-14
"""A gradient that overflows below it is above 2^30, which no training survives; GradScaler would go on."""


class Precision(StrEnum):
    """What blocks compute in while parameters, gradients and optimizer states stay float32."""

    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def of(cls, precision: "Precision | str | None") -> "Precision | None":
        """UsageError for what names none."""
        if precision is None:
            return None
        try:
            return cls(precision)
        except ValueError:
            raise UsageError(
                f"precision={said(precision)} is none of {', '.join(cls)}; leave it out to compute in the "
                "dtype of the parameters"
            ) from None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return torch.bfloat16 if self is Precision.BF16 else torch.float16


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[object]:
    """Where a stage computes: autocast, or nothing. Recomputation enters it again by itself."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)


def forget_casts(device: torch.device) -> None:
    """Under a caller's autocast: parameters were stepped since it cast them, or cast without gradients."""
    if torch.is_autocast_enabled(device.type):
        torch.clear_autocast_cache()


@dataclass(slots=True)
class LossScale:
    """The factor of every loss in float16, so that small gradients do not vanish; equal on all ranks.

    It follows the rule of torch.amp.GradScaler: halved after a step whose gradients are not finite, doubled
    after ``growth_steps`` others in a row. Every rank learns from the commit word whether they are finite.
    """

    value: float = FIRST_SCALE
    growth_steps: int = GROWTH_STEPS
    num_fine: int = 0
    """Steps in a row with finite gradients since the scale last changed."""

    @property
    def is_lost(self) -> bool:
        """Whether gradients overflow at any scale: the fault is not the scale."""
        return self.value < _SMALLEST_SCALE

    def update(self, *, finite: bool) -> None:
        """A step has ended."""
        if not finite:
            self.value *= BACKOFF
            self.num_fine = 0
            return
        self.num_fine += 1
        if self.num_fine == self.growth_steps:
            self.value = min(self.value * GROWTH, _LARGEST_SCALE)
            self.num_fine = 0


def refuse_parameters(precision: Precision | None, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """UsageError for a trainable parameter that is no float32 under autocast."""
    for name, parameter in named if precision is not None else ():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise UsageError(
                f"precision={str(precision)!r} keeps parameters in float32, but {name} is {parameter.dtype}; "
                "make the model in float32, or leave precision= out and train in the parameters' own dtype"
            )


def is_half(dtype: torch.dtype) -> bool:
    """Whether a number has 16 bits."""
    return dtype in (torch.float16, torch.bfloat16)


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """What autograd adds its gradients in."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def as_single(value: Tensor) -> Tensor:
    """A loss as float32 where it has 16 bits, before it is multiplied by a small weight or a large scale."""
    return value.float() if is_half(value.dtype) else value


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Parameters of 16 bits whose gradients autograd adds in a larger dtype during a step."""

    dtype: torch.dtype
    parameters: Sequence[nn.Parameter]

    @classmethod
    def of(cls, dtype: torch.dtype | None, parameters: Iterable[nn.Parameter]) -> "Accumulation":
        """Those of 16 bits among ``parameters``; none where ``dtype`` is None.

        Raises:
            UnsupportedEnvironmentError: A torch without ``Tensor.grad_dtype``.

        """
        if dtype is None:
            return cls(torch.float32, ())
        found = cls(dtype, tuple(p for p in parameters if p.requires_grad and is_half(p.dtype)))
        if any(not hasattr(parameter, "grad_dtype") for parameter in found.parameters):
            raise UnsupportedEnvironmentError(
                f"accumulate={dtype} needs torch 2.10 or later, where a gradient may have another dtype than "
                f"its parameter; this is torch {torch.__version__}: pip install --upgrade torch"
            )
        found.begin()
        return found

    def begin(self) -> None:
        """Before the first backward of a step."""
        for parameter in self.parameters:
            parameter.grad = None
            parameter.grad_dtype = self.dtype

    def round(self) -> None:
        """Give each the gradient in its own dtype, for its optimizer: rounded once, after all sums."""
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def is_finite(gradient: Tensor | None) -> bool:
    """Whether a gradient holds numbers only."""
    return gradient is None or bool(gradient.isfinite().all())
