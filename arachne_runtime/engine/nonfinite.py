"""Finds where a gradient became infinite or no number, and tells every rank together."""

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from ..errors import NonFiniteGradientError
from ..mesh import Mesh
from ..model import StageModule
from ..plan.order import Summed
from ..plan.placement import holding, places
from ..plan.plan import Plan
from .precision import is_finite

_PARAMETERS = 2**20
"""More than the parameters of a block, to write (block, parameter) as one number."""


def refuse_non_finite(
    plan: Plan, summed: Summed, mesh: Mesh, stages: Sequence[StageModule], loss: float
) -> None:
    """Agree on the highest block with such a gradient; nothing where only their norm is too large.

    All ranks call it together, after the sums. What is not finite goes down from block to block, so that it
    began in the highest one, or in the loss.

    Raises:
        NonFiniteGradientError: On every rank, with parameter, block and the ranks that hold it.

    """
    highest = torch.tensor([_highest(summed, stages)], dtype=torch.int64, device=mesh.device)
    if mesh.num_ranks > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if (found := int(highest.item())) >= 0:
        block, index = divmod(found, _PARAMETERS)
        _refuse(plan, block, summed.forms[block][index].name, loss)


def _highest(summed: Summed, stages: Sequence[StageModule]) -> int:
    """Number of the (block, parameter) on this rank; -1: all gradients are finite."""
    found = -1
    for stage in stages:
        named = {name: p for b in stage.block_range for name, p in stage.block_parameters(b)}
        named |= dict(stage.tied_parameters())
        for block in stage.block_range:
            for index, form in enumerate(summed.forms[block]):
                if not is_finite(named[form.tie or form.name].grad):
                    found = max(found, block * _PARAMETERS + index)
    return found


def _refuse(plan: Plan, block: int, name: str, loss: float) -> NoReturn:
    where = [place for place in places(plan) if block in holding(plan, place)[1].blocks]
    ranks = ", ".join(f"{p.rank} ({p.device}, stage {p.stage} of pipeline {p.pipeline})" for p in where)
    began = "" if math.isfinite(loss) else f"; the loss is {loss:g} already"
    raise NonFiniteGradientError(
        f"the gradient of {name} is not finite: block {block}, on rank {ranks}, is the highest with such a "
        f"one{began}. No parameter was changed: look at this batch and at divisions, logarithms and square "
        "roots there; lower the learning rate, or clip the steps before (clip_norm=)"
    )
