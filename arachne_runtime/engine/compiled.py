"""Blocks through torch.compile; blocks of one kind share what the compiler made where they are alike."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ..errors import UnsupportedPlanError, UsageError
from ..model.experts import HoldsExperts
from ..model.stage import Chain, StageModule
from ..plan.plan import Plan, ScheduleKind
from ..plan.walk import said

DEFAULT_BACKEND = "inductor"


def refuse_compiled(plan: Plan, backend: str | None) -> None:
    """UnsupportedPlanError for what takes products out of a block, or shares one out over devices."""
    if backend is None:
        return
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if any(len(replica.devices) > 1 for replica in stage.replicas):
                raise UnsupportedPlanError(
                    f"$.pipelines[{p}].stages[{s}] shares its blocks out over devices, whose exchanges a "
                    "compiler would have to keep in order; make each device a replica, or leave compile= out"
                )
    if plan.schedule == ScheduleKind.ZERO_BUBBLE:
        raise UnsupportedPlanError(
            f"$.schedule is {plan.schedule}, which leaves the gradients of weights out of a backward, and a "
            "compiled block computes them with the rest; plan with schedule 1f1b, or leave compile= out"
        )


def backend_of(asked: bool | str) -> str | None:
    """The compiler for ``compile=``: torch's own, one by name, or none; UsageError for an unknown name."""
    if asked is False:
        return None
    backend = DEFAULT_BACKEND if asked is True else asked
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise UsageError(
            f"compile={said(asked)} is no compiler of torch; use True ({DEFAULT_BACKEND}), or one of "
            f"{', '.join(torch.compiler.list_backends())}"  # without those for torch's own tests
        )
    return backend


def compile_blocks(stage: StageModule, backend: str) -> None:
    """Compile each block where it is called next; parameters, names and hooks stay as they are.

    Experts are left out: the numbers of their tokens change with every call, and so would the code.
    """
    for module in stage.modules():
        if isinstance(module, HoldsExperts):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
    for block in stage.blocks.values():
        for part in _parts(block):
            part.compile(backend=backend)


def uncompiled(compiled: bool) -> AbstractContextManager[object]:
    """Where blocks are called in other shapes than those of the training, which would be compiled too."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _parts(block: nn.Module) -> tuple[nn.Module, ...]:
    """What is called one after the other: a block of several modules is no module that is called itself."""
    return tuple(block.children()) if isinstance(block, Chain) else (block,)
