"""Where autograd's graph of a stage begins: tensors from elsewhere, whose gradients are caught."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class Entry:
    """Tensors that enter a piece of a stage, and the gradients that come back to them.

    They are no leaves, since a model may change its input in place (``nn.ReLU(inplace=True)``).
    """

    def __init__(self, tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
        """Begin a graph at ``tensors``, which must not need gradients themselves."""
        self._caught: dict[int, Tensor] = {}
        self._needs_grad = tuple(needs_grad)
        anchor = torch.zeros((), requires_grad=True)
        self.tensors = tuple(
            _Enter.apply(anchor, tensor, self._caught, index) if needed else tensor  # type: ignore[no-untyped-call]
            for index, (tensor, needed) in enumerate(zip(tensors, needs_grad, strict=True))
        )

    @classmethod
    def behind(cls, outputs: Sequence[Tensor]) -> "Entry":
        """Cut the graph behind ``outputs``: same memory, a new graph.

        Entering counts as a change in place; here nothing was changed, and what saved an output must not
        take it for changed.
        """
        tensors = tuple(tensor.detach() for tensor in outputs)
        with _unsafe_preserve_version_counter(tensors):
            return cls(tensors, [tensor.requires_grad for tensor in outputs])

    def gradients(self) -> tuple[Tensor | None, ...]:
        """One for each tensor that needs it, after the backward; None for those that nothing used.

        They are not zeros: what made such a tensor has no gradient in one process.
        """
        return tuple(self._caught.pop(index, None) for index, needed in enumerate(self._needs_grad) if needed)


class _Enter(torch.autograd.Function):
    """Gives its tensor a place in the graph (that of ``anchor``) without a copy, and keeps its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, caught: dict[int, Tensor], index: int) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.set_materialize_grads(False)  # a function may give no gradient, which is not one of zeros
        ctx.caught, ctx.index = caught, index
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if gradients[0] is not None:
            ctx.caught[ctx.index] = gradients[0]
        return None, None, None, None
