"""Finds an optimizer that steps parameters together: on the ranks of a pipeline, each of which has a part of
them, it would step them otherwise.
"""

import inspect
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedPlanError, UsageError
from ..plan.plan import Plan
from ..plan.zero import is_split
from .recipe import Optimizers
from .tolerance import tolerance_of

_STEPS = 24
"""What starts small and grows with each step (a learned learning rate) shows by then."""
_LEARNING_RATE = 1e-3
"""In place of 0, with which a warm-up may begin."""


def refuse_optimizer(
    optimizer: Optimizer | None, make: Optimizers, like: Tensor, plan: Plan, *, stochastic: bool
) -> None:
    """Refuse what is no optimizer, what evaluates the model again, and what steps parameters together.

    The latter is tried on a few small parameters, unless torch made the optimizer, no stage is a part of the
    model, or it is waived. One that fails on them tells nothing.

    Raises:
        UsageError: No optimizer, or one that needs a closure.
        UnsupportedPlanError: One that steps parameters together.

    """
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise UsageError(
            f"optimizer= returned {type(optimizer).__name__}, not a torch.optim.Optimizer, and nothing would "
            "be trained; return one: optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4)"
        )
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__}.step needs a closure that evaluates the model again, which a "
            "pipeline cannot offer; use an optimizer of the SGD or Adam families"
        )
    assert optimizer is not None
    cut = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    if cut and not stochastic and not type(optimizer).__module__.startswith("torch.optim."):
        _refuse_joint(optimizer, make, like)
    if not stochastic and any(
        len(r.devices) > 1 for p in plan.pipelines for s in p.stages for r in s.replicas
    ):
        _refuse_whole(optimizer, make, like)
    if any(is_split(stage) for pipeline in plan.pipelines for stage in pipeline.stages):
        _refuse_shaped(optimizer, make, like)


def _refuse_shaped(optimizer: Optimizer, make: Optimizers, like: Tensor) -> None:
    """Refuse what looks at a parameter's shape: ZeRO steps runs of elements, which no parameter bounds."""
    matrix, *_ = _parameters(like)
    runs = [nn.Parameter(run.clone()) for run in torch.split(matrix.detach().flatten(), [5, 7])]
    try:
        (whole,) = _trained(optimizer, make, [[matrix]], of_one=True)
    except Exception:  # an optimizer that was not made for these parameters
        return
    try:
        flat = torch.cat(_trained(optimizer, make, [[run] for run in runs], of_one=True))
        furthest = float((whole.flatten() - flat).abs().max())
    except Exception:  # one that wants matrices
        furthest = math.inf
    if furthest > tolerance_of(whole.dtype) * float(whole.abs().max()):
        raise UnsupportedPlanError(
            f"{type(optimizer).__name__} steps a parameter by its shape, and ZeRO hands it runs of elements; "
            "use an optimizer that treats each element alone (the SGD and Adam families), or set zero to 0"
        )


def _refuse_whole(optimizer: Optimizer, make: Optimizers, like: Tensor) -> None:
    """Refuse what looks at a whole parameter, of which a tensor-parallel rank has a part: Muon, Adafactor."""
    whole = _parameters(like)[0]
    for dim in (0, 1):
        try:
            copy = nn.Parameter(whole.detach().clone())
            together = _trained(optimizer, make, [[copy]], of_one=True)
            parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(2, dim)]
            apart = torch.cat(_trained(optimizer, make, [[part] for part in parts], of_one=True), dim)
        except Exception:  # an optimizer that was not made for these parameters
            return
        size = float(together[0].abs().max())
        furthest = float((together[0] - apart).abs().max())
        if furthest > tolerance_of(whole.dtype) * size:
            raise UnsupportedPlanError(
                f"{type(optimizer).__name__} steps a part of a parameter otherwise than the whole (by "
                f"{furthest / size:.2g} of the step), and a tensor-parallel rank has only a part; use an "
                "optimizer of the SGD or Adam families, TP 1, or waive this with stochastic=True"
            )


def _refuse_joint(optimizer: Optimizer, make: Optimizers, like: Tensor) -> None:
    try:
        together = _trained(optimizer, make, [_parameters(like)])
        apart = _trained(optimizer, make, [[p] for p in _parameters(like)])
    except Exception:  # an optimizer that was not made for these parameters
        return
    size = max(float(moved.abs().max()) for moved in together)
    furthest = max(float((a - b).abs().max()) for a, b in zip(together, apart, strict=True))
    if furthest > tolerance_of(together[0].dtype) * size:
        raise UnsupportedPlanError(
            f"{type(optimizer).__name__} steps a parameter otherwise when another one is stepped with it (by "
            f"{furthest / size:.2g} of the step), and each stage's rank steps only its own; use an optimizer "
            "that treats each parameter alone (the SGD and Adam families), a plan whose pipelines have one "
            "stage, or waive this with stochastic=True"
        )


def _parameters(like: Tensor) -> list[nn.Parameter]:
    dtype = torch.promote_types(like.dtype, torch.float32)
    numbers = torch.linspace(-1, 1, 12, dtype=dtype, device=like.device)
    return [nn.Parameter(numbers.view(shape) / 10) for shape in ((3, 4), (12,), (4, 3), (12,))]


def _trained(
    optimizer: Optimizer,
    make: Optimizers,
    groups: Sequence[Sequence[nn.Parameter]],
    *,
    of_one: bool = False,
) -> list[Tensor]:
    """How far each parameter, or part ``of_one``, moves where every group has an optimizer of its own."""
    parameters = [parameter for group in groups for parameter in group]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizers = [_another(optimizer, make, group) for group in groups]
    for step in range(_STEPS):
        for index, parameter in enumerate(parameters):
            # of another size for each, always downhill for some: what adapts to the whole must show
            size, shift, slope = (1.0, 0, 20) if of_one else (10.0**index, 2 * (index % 2), 1)
            parameter.grad = size * (shift + torch.cos(step + slope * before[index]))
        for each in optimizers:
            each.step()
    return [p.detach() - start for p, start in zip(parameters, before, strict=True)]


def _another(optimizer: Optimizer, make: Optimizers, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """One like ``optimizer``, by its class and settings; by the user's function where these do not do."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    try:
        other = kind(parameters, **{k: v for k, v in optimizer.defaults.items() if k in accepted})
    except Exception:  # a class that wraps another
        other = make(iter(parameters))
    for group in other.param_groups:
        group["lr"] = group.get("lr") or _LEARNING_RATE
    return other
