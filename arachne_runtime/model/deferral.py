"""Leaves the gradients of weight matrices out of a backward, to be computed later (zero-bubble schedules).

Products with a weight (``F.linear``, ``x @ w``, ``addmm``) are found where they are called, while a stage
runs forward. All else (norms, biases, embeddings, convolutions) stays in the first half of the backward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class _Product:
    """``x @ weight``, or ``x @ weight.t()`` where it is ``transposed``, and a bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class _Debt:
    """The gradient of one weight by one product, ``x`` and ``gradient`` being [..., features]."""

    weight: Tensor
    x: Tensor
    gradient: Tensor
    transposed: bool

    def pay(self) -> None:
        """Compute the gradient and add it as autograd would: in the weight's dtype, with its hooks."""
        first, second = self.x.flatten(0, -2), self.gradient.flatten(0, -2)
        if self.transposed:
            first, second = second, first
        torch.autograd.backward(self.weight, (first.t() @ second).to(self.weight.dtype))


class Deferral(TorchFunctionMode):
    """While it is entered, products leave out the gradients of their weights; ``pay`` computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_due = False
        """Whether the backward runs that the products wait for."""
        self._debts: list[_Debt] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._saving: Any = None
        """Who was given saved tensors where the stage began: the stage's own recomputation, or nobody."""

    def __enter__(self) -> Self:
        self._saving = _saving()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._saving = None  # it may hold this deferral
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, or the product that it is without its weight's gradient."""
        kwargs = kwargs or {}
        find = _PRODUCTS.get(func)
        product = find(*args, **kwargs) if find is not None and torch.is_grad_enabled() else None
        if product is None or not _is_trained_matrix(product) or _saving() is not self._saving:
            return func(*args, **kwargs)  # what a block recomputes by itself saves other tensors then
        x, weight, bias = _as_computed(product)
        return _Deferred.apply(  # type: ignore[no-untyped-call]
            self._anchor, x, weight.detach(), bias, product.weight, product.transposed, self
        )

    def owe(self, debt: _Debt) -> None:
        """Take a debt; ModelError where a backward of the model's own asks for gradients."""
        if not self.is_due:
            raise ModelError(
                "a block takes gradients inside its forward, which a zero_bubble schedule cannot split from "
                "the step's own; plan with schedule 1f1b"
            )
        self._debts.append(debt)

    def owed(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each gradient that was left out: the weight, the product's input, the gradient of its result."""
        return ((debt.weight, debt.x, debt.gradient) for debt in self._debts)

    def pay(self) -> None:
        """Add every gradient that was left out, and forget what it took."""
        while self._debts:
            self._debts.pop().pay()


class _Deferred(torch.autograd.Function):
    """A product whose backward gives the gradients of its input and its bias."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owner: Tensor,
        transposed: bool,
        deferral: Deferral,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.transposed, ctx.deferral = owner, transposed, deferral
        return F.linear(x, weight if transposed else weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # then the weight has none either
            return (None,) * 7
        x, weight = ctx.saved_tensors
        ctx.deferral.owe(_Debt(ctx.owner, x, gradient, ctx.transposed))
        _, of_x, _, of_bias, *_ = ctx.needs_input_grad
        return (
            None,
            gradient @ (weight if ctx.transposed else weight.t()) if of_x else None,
            None,
            gradient.flatten(0, -2).sum(0) if of_bias else None,
            None,
            None,
            None,
        )


def _saving() -> Any:
    """The innermost hooks on saved tensors (torch.utils.checkpoint, offloading), or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def _is_trained_matrix(product: _Product) -> bool:
    """Whether the weight is a parameter, or a DTensor of shards; neither another subclass nor computed."""
    weight, x = product.weight, product.x
    if not isinstance(weight, Tensor) or not weight.requires_grad or weight.dim() != 2 or x.dim() < 2:
        return False
    if is_distributed(weight):
        return is_distributed(x)
    return type(weight) is nn.Parameter and type(x) in (Tensor, nn.Parameter)


def is_distributed(tensor: Tensor) -> bool:
    """By its attribute, as torch's DTensor is not imported where nothing is shared out."""
    return hasattr(tensor, "device_mesh")


def _as_computed(product: _Product) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight and bias in the dtype in which autocast computes a product."""
    x, weight, bias = product.x, product.weight, product.bias
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    return x, weight, bias


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves double precision as it is."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Product:
    return _Product(input, weight, bias, transposed=True)


def _matmul(input: Tensor, other: Tensor, **rest: Any) -> _Product | None:
    return None if rest else _Product(input, other, None, transposed=False)


def _mm(input: Tensor, mat2: Tensor, **rest: Any) -> _Product | None:
    return None if rest else _Product(input, mat2, None, transposed=False)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **rest: Any) -> _Product | None:
    return None if rest or input.dim() != 1 else _Product(mat1, mat2, input, transposed=False)


_PRODUCTS: Mapping[Any, Callable[..., _Product | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
}
