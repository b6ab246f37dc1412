"""Counts what a block's backward and its optimizer step hold beside what lives anyway."""

import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..model.deferral import Deferral
from ..plan.profile import WorkingBytes
from ..units import Bytes
from .kept import local, saved_by
from .live import Count, counted
from .probe import Passes

LET_GO_S = 0.01
"""For gloo's threads: several times the time slice of Linux' scheduler, 3 ms by default."""


def working_bytes(passes: Passes) -> WorkingBytes:
    """What a block's backward needs, without gradients of its parameters before it and with them."""
    for parameter in passes.probe.stage.parameters():
        parameter.grad = None
    first, later = _backward(passes), _backward(passes)
    first_behind, behind = _behind_loss(passes, first=True), _behind_loss(passes)
    loss, owing = _loss(passes), _owing(passes)
    return WorkingBytes(
        backward=later,
        first_backward=first,
        forward=_forward(passes),
        loss=loss,
        recomputed=_recomputed(passes) - loss if loss else 0,
        behind_loss=behind,
        first_behind_loss=first_behind,
        owing_backward=owing.backward,
        owed=owing.left,
        owed_gradients=owing.gradients,
        paying=owing.paying,
        first_paying=_owing(passes, first=True).paying,
    )


def _settled(count: Count) -> Bytes:
    """Bytes that are alive once threads of collectives that have ended had time to drop their tensors."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        time.sleep(LET_GO_S)
    return count.now_bytes


def temporary_bytes(device: torch.device, step: Callable[[], object], held: Iterator[Tensor]) -> Bytes:
    """Most bytes that ``step`` allocates at once beside what is ``held``."""
    with counted(device, lambda: held) as count:
        before = count.now_bytes
        step()
    return count.peak_bytes - before


def _backward(passes: Passes) -> Bytes:
    """The peak of a backward over what its forward left; the gradient of the output is made in it."""
    with counted(passes.inputs[0].device, lambda: _held(passes)) as count:
        passes.forward()
        before = _settled(count)
        count.restart()
        passes.backward()
    passes.forget()
    return count.peak_bytes - before


def _behind_loss(passes: Passes, *, first: bool = False) -> Bytes:
    """The peak of the last block's backward once the loss had its own, over what the block alone keeps."""
    probe = passes.probe
    if probe.loss is None:
        return 0
    if first:
        for parameter in probe.stage.parameters():
            parameter.grad = None
    taken = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in passes.inputs)
    with counted(passes.inputs[0].device, lambda: _held(passes)) as count:
        outputs = probe.stage(taken, passes.context)
        roots = [_OfLoss.apply(out) for out in outputs if out.requires_grad]  # type: ignore[no-untyped-call]
        del outputs
        before = _settled(count)
        count.restart()
        torch.autograd.backward(roots)
    return count.peak_bytes - before


class _OfLoss(torch.autograd.Function):
    """A number that keeps nothing, whose backward makes the gradient of what it was made of."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = output.shape, output.dtype
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return gradients[0].new_zeros(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Owing:
    """What a backward holds, and leaves behind, that computes no gradients of weights (zero-bubble)."""

    backward: Bytes
    left: Bytes
    gradients: Bytes
    paying: Bytes


def _owing(passes: Passes, *, first: bool = False) -> _Owing:
    """All parameters have gradients before; ``first``: the weights that wait have none."""
    deferral = Deferral()
    with counted(passes.inputs[0].device, lambda: _held(passes)) as count:
        with deferral:
            passes.forward()
        before = _settled(count)
        count.restart()
        deferral.is_due = True
        passes.backward()
        backward = count.peak_bytes - before
        passes.forget()
        debts = [tuple(map(local, debt)) for debt in deferral.owed()]
        weights = sum(tensor.nbytes for tensor in {id(w): w for w, _, _ in debts}.values())
        left = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, *ts in debts for t in ts}
        left_bytes = sum(storage.nbytes() for storage in left.values())
        if first:
            _forget(passes.probe.stage.parameters(), {weight.data_ptr() for weight, _, _ in debts})
        del debts, left
        before = _settled(count)
        count.restart()
        deferral.pay()
    return _Owing(backward, left_bytes, weights, count.peak_bytes - before)


def _forget(parameters: Iterable[Tensor], addresses: Set[int]) -> None:
    """Drop the gradients of those whose memory is at some address."""
    for parameter in parameters:
        if parameter.data_ptr() in addresses:
            parameter.grad = None


def _forward(passes: Passes) -> Bytes:
    with torch.no_grad(), counted(passes.inputs[0].device, lambda: _held(passes)) as count:
        before = count.now_bytes
        count.restart()
        passes.forward()
    passes.forget()
    return count.peak_bytes - before


def _recomputed(passes: Passes) -> Bytes:
    """The peak of the last block's backward over its weights and input, what its loss keeps included."""
    probe, loss = passes.probe, passes.probe.loss
    assert loss is not None
    taken = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in passes.inputs)
    with counted(passes.inputs[0].device, lambda: _held(passes)) as count:
        before = count.now_bytes
        outputs = checkpoint(probe.stage, taken, passes.context, use_reentrant=False)
        value = loss(outputs[0] if len(outputs) == 1 else outputs, passes.batch)
        del outputs
        count.restart()
        torch.autograd.backward(value)
    return count.peak_bytes - before


def _held(passes: Passes) -> Iterator[Tensor]:
    parameters = list(passes.probe.stage.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return chain(parameters, gradients, passes.probe.stage.buffers(), passes.inputs)


def _loss(passes: Passes) -> Bytes:
    """Bytes that the loss alone keeps for its backward; 0 but for the last block."""
    loss = passes.probe.loss
    if loss is None:
        return 0
    with torch.no_grad():
        outputs = passes.probe.stage(passes.inputs, passes.context)
    leaves = tuple(o.detach().requires_grad_(o.is_floating_point()) for o in outputs)
    saved = saved_by(lambda: (loss(leaves[0] if len(leaves) == 1 else leaves, passes.batch),))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
