"""Constructs a user's module without its memory: parameters on the meta device, buffers real."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ModelError
from .writes import WriteLog

_LOCK = threading.RLock()
_CONSTRUCTION_SEED = 0
"""Buffers that a constructor draws at random are drawn under this seed: equal on every rank and plan."""


@dataclass(frozen=True, slots=True)
class Construction:
    """A model whose parameters take no memory, and every write that its constructors made to them."""

    model: nn.Module
    log: WriteLog


def construct(factory: Callable[[], nn.Module]) -> Construction:
    """Call ``factory`` with each parameter moved to the meta device as it is registered.

    Buffers keep their values (causal masks, rotary tables). The caller's random state is left as it was.

    Raises:
        ModelError: The factory returned no module, one that existed before, or one whose parameters or
            buffers cannot be built this way.

    """
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise ModelError(
            f"a model ({name}) where a function that makes one is wanted: each rank builds its own part; "
            f"pass the class, or lambda: {name}(...)"
        )
    log = WriteLog("meta")
    with torch.random.fork_rng(devices=[]), parameters_on_meta(), log:
        torch.manual_seed(_CONSTRUCTION_SEED)
        try:
            model = factory()
        except Exception as error:
            error.add_note(
                "while the model was constructed with its parameters on the meta device (they have shapes, "
                "no values, and cannot be moved); set values in pipelined(init=...), not in a constructor"
            )
            raise
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model factory returned {type(model).__name__}, not an nn.Module")
    _refuse_what_has_values(model)
    return Construction(model, log)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, parameters that this thread registers on a module are moved to the meta device."""
    builder = threading.get_ident()
    moved = WeakIdKeyDictionary()  # a parameter that two modules register stays one parameter
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if threading.get_ident() == builder and _has_memory(param):
            if param not in moved:
                moved[param] = _on_meta(param)
            param = moved[param]
        register(self, name, param)

    with _LOCK:
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _has_memory(param: nn.Parameter | None) -> bool:
    return param is not None and not isinstance(param, UninitializedParameter) and not param.is_meta


def _on_meta(param: nn.Parameter | None) -> nn.Parameter:
    assert param is not None
    moved = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    moved.__dict__.update(param.__dict__)
    return moved


def _refuse_what_has_values(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ModelError(
                f"parameter {name} has no shape yet: lazy modules cannot be cut into stages; "
                "give the sizes (nn.Linear instead of nn.LazyLinear)"
            )
        if not parameter.is_meta:
            raise ModelError(
                f"parameter {name} has memory already: the model existed before, or was given other "
                "parameters behind nn.Module's back; pass a factory that constructs it, lambda: GPT(config)"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"parameter {name} has a hook on its gradient, which would be lost when a rank allocates its "
                "part; do the same in forward (a mask: multiply the parameter by it)"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} was computed from a parameter (or made on the meta device), so it has no "
                "value when a rank builds only its part; compute it in forward, or make it a parameter"
            )
