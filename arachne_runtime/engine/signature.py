"""What crosses a boundary, apart from its values: dtype, shape of a sample, whether gradients come back."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import ModelError

MAX_TENSORS = 16
"""Tensors that may cross one boundary; fixes the size of a header."""
MAX_DIMS = 8
"""Dims of such a tensor, the rows included."""
_FIXED = 4
"""Numbers of a tensor before its shape."""
HEADER_LENGTH = 2 + MAX_TENSORS * (_FIXED + MAX_DIMS)
"""Whole numbers in a header: rows of the global batch, how many tensors; of each dtype, requires_grad,
shares_memory, dims, shape."""

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""By number on the wire; only ever appended to."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Form of one tensor, the same for every micro-batch of a step."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Without the leading dim, which holds the rows."""
    requires_grad: bool
    shares_memory: bool = False
    """With another tensor of the boundary: a change in place would show in both, but not across ranks."""


Signature: TypeAlias = tuple[TensorForm, ...]


def signature_of(tensors: Sequence[Tensor], num_rows: int) -> Signature:
    """The forms of ``tensors``, whose leading dim must be ``num_rows``; ModelError otherwise."""
    if len(tensors) > MAX_TENSORS:
        raise ModelError(
            f"{len(tensors)} tensors leave a stage; at most {MAX_TENSORS} can: stack some of them"
        )
    memory = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
    return tuple(_form(t, num_rows, memory[t.untyped_storage().data_ptr()] > 1) for t in tensors)


def _form(tensor: Tensor, num_rows: int, shares_memory: bool) -> TensorForm:
    shape = tuple(tensor.shape)
    if not shape or shape[0] != num_rows or len(shape) > MAX_DIMS or tensor.dtype not in _DTYPES:
        raise ModelError(
            f"a {tensor.dtype} tensor of shape {shape} leaves a stage that was given {num_rows} rows; what "
            f"crosses a boundary has the rows in dim 0 and at most {MAX_DIMS} dims; give the rest as context"
        )
    return TensorForm(tensor.dtype, shape[1:], tensor.requires_grad, shares_memory)


def encode(signature: Signature, num_rows: int) -> Tensor:
    """A header, HEADER_LENGTH whole numbers, of a step on ``num_rows`` rows."""
    numbers = [num_rows, len(signature)]
    for form in signature:
        padding = [0] * (MAX_DIMS - len(form.shape))
        numbers += [_DTYPES.index(form.dtype), form.requires_grad, form.shares_memory]
        numbers += [len(form.shape), *form.shape, *padding]
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)))


def decode(header: Tensor) -> tuple[Signature, int]:
    """The signature of a header, and the rows of the global batch."""
    num_rows, count, *numbers = header.tolist()
    width = _FIXED + MAX_DIMS
    return tuple(_read(numbers[i * width : (i + 1) * width]) for i in range(count)), num_rows


def _read(numbers: Sequence[int]) -> TensorForm:
    dtype, requires_grad, shares_memory, dims, *shape = numbers
    return TensorForm(_DTYPES[dtype], tuple(shape[:dims]), bool(requires_grad), bool(shares_memory))


def gradients_of(signature: Signature) -> Signature:
    """The form of the gradients that come back."""
    return tuple(TensorForm(f.dtype, f.shape, False) for f in signature if f.requires_grad)
