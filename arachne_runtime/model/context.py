"""What every block may be told beside its input: the user's context function, on the device of a stage."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .layout import Block, ContextFunction, Layout
from .stage import accepted_keywords


def context_function(
    model: nn.Module, layout: Layout, blocks: Sequence[Block], place: Callable[[Tensor], Tensor]
) -> ContextFunction | None:
    """The user's context function; it may only give keywords that some block takes, or None without one.

    A method reads buffers of the model that are in no block (rotary tables): ``place`` puts them where the
    stage computes, as it does what the function returns.

    Raises:
        ModelError: The class has no such method; later, a keyword that no block takes, or that is computed
            from a parameter.

    """
    if layout.context is None:
        return None
    name = type(model).__name__
    function: Any = layout.context
    if isinstance(layout.context, str):
        function = getattr(_beside_blocks(model, blocks, place), layout.context, None)
    if not callable(function):
        raise ModelError(f"{name} has no method {layout.context!r}, which @pipelined(context=...) names")
    known = _known_keywords(blocks)

    device = place(torch.empty(0)).device

    def context(batch: Any) -> Mapping[str, Tensor]:
        given: Mapping[str, Tensor] = function(batch)
        for key, tensor in given.items():
            if known is not None and key not in known:
                raise ModelError(f"context of {name} gives {key!r}, which the forward of no block takes")
            if tensor.is_meta and device.type != "meta":
                raise ModelError(
                    f"context of {name} computes {key!r} from a parameter; use buffers and the batch"
                )
        return {key: tensor.to(device, non_blocking=True) for key, tensor in given.items()}

    return context


def _known_keywords(blocks: Sequence[Block]) -> frozenset[str] | None:
    """Keywords that any block takes; None: all."""
    taken = [accepted_keywords(part) for block in blocks for _, part in block.parts]
    if None in taken:
        return None
    return frozenset(keyword for keywords in taken if keywords for keyword in keywords)


def _beside_blocks(model: nn.Module, blocks: Sequence[Block], place: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model that shares the blocks, its other buffers placed."""
    inside = {id(module): module for block in blocks for _, part in block.parts for module in part.modules()}
    beside = copy.deepcopy(model, dict(inside))
    for module in beside.modules():
        if id(module) not in inside:
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = place(buffer)
    return beside
