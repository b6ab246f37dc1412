"""What the engine of a rank holds, by global names that no plan changes: parameters, buffers, and states of
the optimizer, each as parts of whole tensors that can be read and written where they are.

``holdings`` lists the tensors, ``scalars`` the numbers beside them. A new engine has no states yet:
``make_states`` makes room for them, others write them, ``settle`` lets the engine go on from there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..backends.protocol import StateRun
from ..engine import Engine
from ..errors import UnsupportedPlanError
from ..plan.shards import ParameterForm
from .parts import Part, run_of_elements, whole

VALUE = ""
"""Key of a parameter's or a buffer's own values, beside those of its states."""

EXTRA_STATE = "_extra_state"
"""How the names of what ``nn.Module.get_extra_state`` returns end in a ``state_dict``."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of one tensor of the job, and where this rank has it."""

    name: str
    """Of the parameter or buffer: ``blocks.<id>.<name inside>``; of a shared parameter, that of its tie."""
    key: str
    """Of a state of the optimizer (``exp_avg``), or ``VALUE``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    part: Part
    tensor: Tensor
    """Of the part's shape, without gradient: to write into it is to change the engine."""
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that the optimizer keeps of a parameter, such as its count of steps."""

    value: float | int | bool | None
    dtype: str | None
    """Of the tensor of no dims that holds it (``float32``); None: it is a plain number."""


Scalars: TypeAlias = Mapping[str, Mapping[str, Scalar]]
"""By name of the parameter and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Which states the optimizer is to have of one parameter."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """By key, of those that have an element for each of the parameter's."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)


def holdings(engine: Engine) -> tuple[Holding, ...]:
    """Every tensor that this rank must have to go on, in parts; the same part may be on other ranks too.

    Raises:
        UnsupportedPlanError: ZeRO-2 or 3; a state that is neither a number nor one of each element.

    """
    refuse_unlisted(engine)
    return tuple(_parameters(engine)) + tuple(_buffers(engine)) + tuple(_states(engine))


def scalars(engine: Engine) -> dict[str, dict[str, Scalar]]:
    """The numbers that the optimizer keeps of each parameter that it has trained."""
    names = _names(engine)
    found: dict[str, dict[str, Scalar]] = {}
    for run in engine.backend.runs():
        numbers = {key: value for key, value in _state_of(engine, run).items() if _is_scalar(value, run)}
        if run.is_trained and numbers:
            found[names[id(run.parameter)]] = {key: _scalar(value) for key, value in numbers.items()}
    return found


def make_states(
    engine: Engine, states: Mapping[str, States], own: Mapping[tuple[str, str], Tensor] = MappingProxyType({})
) -> None:
    """Give the optimizer of this rank states of the parameters that it holds, zeros in place of tensors.

    Args:
        engine: Between two steps; what states it has are forgotten.
        states: By name of the parameter; one that is not there has not been trained.
        own: By name of the parameter and key, tensors of this rank's part that may become the state itself.

    Raises:
        UnsupportedPlanError: ZeRO keeps one number for parameters whose numbers differ, or one tensor for
            parameters that have other states.

    """
    refuse_unlisted(engine)
    if engine.optimizer is None:
        return
    names = _names(engine)
    engine.backend.set_trained([p for name, p in engine.named_parameters() if name in states])
    by_stepped: dict[int, list[StateRun]] = defaultdict(list)
    for run in engine.backend.runs():
        by_stepped[id(run.stepped)].append(run)
    engine.optimizer.state.clear()
    for runs in by_stepped.values():
        wanted = {names[id(run.parameter)]: states.get(names[id(run.parameter)]) for run in runs}
        if agreed := _agreed({name: each for name, each in wanted.items() if each is not None}):
            made = _made(engine.optimizer, runs[0].stepped, agreed)
            if runs[0].inside is None:
                (name,) = wanted
                made |= {key: own[name, key] for key in agreed.dtypes if (name, key) in own}
            engine.optimizer.state[runs[0].stepped] = made


def settle(engine: Engine) -> None:
    """Let the engine go on from what was written into its holdings."""
    engine.backend.take_parameters()


def refuse_unlisted(engine: Engine) -> None:
    """UnsupportedPlanError for what has no form here, with the way out."""
    next(engine.backend.runs(), None)
    for stage in engine.stages:
        for name in stage.state_dict():
            if name.endswith(EXTRA_STATE):
                raise UnsupportedPlanError(
                    f"{name}: a module keeps a state that is no tensor, which cannot be cut or moved; "
                    "keep it in a buffer"
                )


def _parameters(engine: Engine) -> Iterator[Holding]:
    forms, parts = forms_of(engine), engine.held_parts()
    for name, parameter in engine.named_parameters():
        yield Holding(name, VALUE, forms[name].shape, parts[name], parameter.detach())


def _buffers(engine: Engine) -> Iterator[Holding]:
    """Those that a ``state_dict`` has: others are computed anew."""
    for stage in engine.stages:
        kept = stage.state_dict()
        for name, buffer in stage.named_buffers():
            if name in kept:
                shape = tuple(buffer.shape)
                yield Holding(name, VALUE, shape, whole(shape), buffer.detach(), is_buffer=True)


def _states(engine: Engine) -> Iterator[Holding]:
    forms, parts, names = forms_of(engine), engine.held_parts(), _names(engine)
    for run in engine.backend.runs():
        name = names[id(run.parameter)]
        for key, value in _state_of(engine, run).items() if run.is_trained else ():
            if _is_scalar(value, run):
                continue
            if not isinstance(value, Tensor) or value.shape != run.stepped.shape:
                raise _no_form(engine, name, key, value)
            for part, tensor in _pieces(run, value, parts[name]):
                yield Holding(name, key, forms[name].shape, part, tensor)


def _pieces(run: StateRun, value: Tensor, part: Part) -> Iterator[tuple[Part, Tensor]]:
    """A state of some elements, where it lies, as parts of the whole."""
    if run.inside is None:
        yield part, value.detach()
        return
    flat = value.detach()[run.inside]
    for elements, piece in run_of_elements(run.elements, part):
        first = elements.start - run.elements.start
        shape = [sum(map(len, runs)) for runs in piece]
        yield piece, flat[first : first + len(elements)].view(shape)


def forms_of(engine: Engine) -> dict[str, ParameterForm]:
    """Of every parameter of the model, by the names of ``Engine.named_parameters``."""
    return {form.tie or form.name: form for block in reversed(engine.forms) for form in block}


def _names(engine: Engine) -> dict[int, str]:
    return {id(p): name for name, p in engine.named_parameters()}


def _state_of(engine: Engine, run: StateRun) -> Mapping[str, Any]:
    assert engine.optimizer is not None
    found: Mapping[str, Any] = engine.optimizer.state.get(run.stepped, {})
    return found


def _is_scalar(value: object, run: StateRun) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and run.stepped.dim() > 0
    return value is None or isinstance(value, bool | int | float)


def _scalar(value: Any) -> Scalar:
    if isinstance(value, Tensor):
        return Scalar(value.item(), dtype_name(value.dtype))
    return Scalar(value, None)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    """The dtype of a name, say from a file; LookupError for what is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LookupError(f"{name!r} is no dtype of torch")
    return found


def _no_form(engine: Engine, name: str, key: str, value: object) -> UnsupportedPlanError:
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return UnsupportedPlanError(
        f"{type(engine.optimizer).__name__} keeps {key} of {name} as {what}, neither a number nor one for "
        "each element, so that no other plan could take it over; use an optimizer of the SGD or Adam families"
    )


def _agreed(wanted: Mapping[str, States]) -> States | None:
    """The states of what one tensor stands for, whole or a part of several parameters."""
    if not wanted:
        return None
    (first, states), *others = wanted.items()
    for name, each in others:
        if each != states:
            raise UnsupportedPlanError(
                f"{name} and {first} have other states, or counts of steps ({_said(each)}, {_said(states)}), "
                "but ZeRO keeps one for both; set zero to 0 in the plan"
            )
    return states


def _said(states: States) -> str:
    return ", ".join([*states.dtypes, *(f"{key} {each.value}" for key, each in states.scalars.items())])


def _made(optimizer: torch.optim.Optimizer, stepped: Tensor, states: States) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: torch.zeros_like(stepped, dtype=dtype, memory_format=torch.preserve_format)
        for key, dtype in states.dtypes.items()
    }
    for key, scalar in states.scalars.items():
        found[key] = scalar.value
        if scalar.dtype is not None:
            device = _device_of_scalar(optimizer, stepped, key)
            found[key] = torch.tensor(scalar.value, dtype=dtype_called(scalar.dtype), device=device)
    return found


def _device_of_scalar(optimizer: torch.optim.Optimizer, stepped: Tensor, key: str) -> torch.device:
    """As ``Optimizer.load_state_dict`` places it: counts of steps are read by the host, unless the group's
    kernels read them.
    """
    group = group_of(optimizer, stepped)
    on_host = key == "step" and not group.get("capturable") and not group.get("fused")
    return torch.device("cpu") if on_host else stepped.device


def group_of(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Any]:
    """The parameter group of what the optimizer steps."""
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    return next(group for group in groups if any(p is stepped for p in group["params"]))
