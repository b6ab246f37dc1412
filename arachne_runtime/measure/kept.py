"""Counts the bytes that a block keeps from forward to backward: its input and what autograd saves."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..model.deferral import is_distributed
from ..units import Bytes

Forward = Callable[[], tuple[Tensor, ...]]


def kept_bytes(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    forward: Forward,
    *,
    context: Mapping[str, Tensor],
    outputs_stay: bool,
) -> Bytes:
    """Bytes that stay alive from the forward to the backward of one block for ``inputs``.

    ``forward`` runs the block on ``inputs``. Parameters, buffers and the context are not counted. With
    ``outputs_stay=False`` the output is not counted either: the next block counts it as its input.
    On CUDA it is the allocator's figure, else the storages that autograd saves, each counted once.
    """
    device = inputs[0].device
    if device.type == "cuda":
        return _allocated(inputs, forward, outputs_stay)
    outputs: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        outputs.extend(forward())
        return tuple(outputs)

    saved = saved_by(run)
    for tensor in (*module.parameters(), *module.buffers(), *context.values()):
        saved.pop(_storage(tensor), None)
    if not outputs_stay:
        for tensor in outputs:
            saved.pop(_storage(tensor), None)
    for tensor in inputs:
        saved.pop(_storage(tensor), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) + view_bytes(inputs)


def saved_by(forward: Forward) -> dict[int, Tensor]:
    """What autograd saves during ``forward``, by the address of its storage; the graph runs no backward."""
    saved: dict[int, Tensor] = {}  # held, so that no freed storage lends its address to another

    def save(tensor: Tensor) -> None:
        here = local(tensor.detach())
        saved[_storage(here)] = here

    def restore(_: None) -> Tensor:
        raise AssertionError("a graph that was only counted cannot run backward")

    with torch.autograd.graph.saved_tensors_hooks(save, restore):
        forward()
    return saved


def view_bytes(tensors: Iterable[Tensor]) -> Bytes:
    """Bytes of the tensors' own elements (a slice does not count its whole storage)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be distributed."""
    found: Any = tensor
    part: Tensor = found.to_local() if is_distributed(tensor) else tensor
    return part


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _allocated(inputs: tuple[Tensor, ...], forward: Forward, outputs_stay: bool) -> Bytes:
    device = inputs[0].device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    outputs = forward()
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before + view_bytes(inputs)
    return kept if outputs_stay else kept - view_bytes(outputs)
