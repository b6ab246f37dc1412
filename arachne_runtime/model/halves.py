"""Cuts each layer of a model into several blocks (attention, MLP), which a plan may put on unlike stages."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, TypeAlias

from torch import nn

from ..errors import ModelError

HalfForward: TypeAlias = str | Callable[..., Any]
"""Name of a method of the layer, or a function that takes the layer first."""
Halves: TypeAlias = Mapping[HalfForward, str | tuple[str, ...]]
"""What a half runs → the submodules of the layer that it uses, in the order in which halves run."""


def half_name(forward: HalfForward) -> str:
    """The word for a half."""
    return forward if isinstance(forward, str) else getattr(forward, "__name__", "half")


def halves_of(layer: nn.Module, halves: Halves) -> Iterator[nn.Module]:
    """Views of a layer that hold only the submodules of one half, and run it.

    They are of the layer's class and have its attributes and buffers. Submodules without parameters that no
    half names (dropout, an activation) are in each of them.

    Raises:
        ModelError: Halves that do not share out the layer's parameters, each to one of them.

    """
    used = {
        forward: (names,) if isinstance(names, str) else tuple(names) for forward, names in halves.items()
    }
    _refuse(layer, used)
    named = {name for names in used.values() for name in names}
    free = {
        n
        for n, child in layer.named_children()
        if n not in named and not any(True for _ in child.parameters())
    }
    for forward, names in used.items():
        half = copy.copy(layer)
        half._modules = {n: child for n, child in layer._modules.items() if n in free or n in names}
        half._parameters = {}
        half._buffers = dict(layer._buffers)
        function = getattr(type(layer), forward) if isinstance(forward, str) else forward
        object.__setattr__(half, "forward", MethodType(function, half))
        yield half


def _refuse(layer: nn.Module, used: Mapping[HalfForward, tuple[str, ...]]) -> None:
    what = f"pipelined(halves=...) of {type(layer).__name__}"
    for forward in used:
        if isinstance(forward, str) and not callable(getattr(type(layer), forward, None)):
            raise ModelError(f"{what}: it has no method {forward!r}; name one that runs the half")
    if own := [name for name, _ in layer.named_parameters(recurse=False)]:
        raise ModelError(
            f"{what}: {', '.join(own)} belong to the layer itself, so to no half; put them into a submodule"
        )
    children = dict(layer.named_children())
    times = Counter(name for names in used.values() for name in names)
    if unknown := [name for name in times if name not in children]:
        raise ModelError(f"{what}: no submodule {unknown[0]!r}; it has: {', '.join(children)}")
    if twice := [name for name, count in times.items() if count > 1]:
        raise ModelError(f"{what}: {twice[0]!r} is in two halves, which may be on two ranks; give it to one")
    left = [n for n, child in children.items() if n not in times and any(True for _ in child.parameters())]
    if left:
        raise ModelError(
            f"{what}: {left[0]!r} has parameters and is in no half; name it in the one that uses it"
        )
