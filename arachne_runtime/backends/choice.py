"""Which backend holds the optimizer of a rank, by its plan."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import UsageError
from ..mesh import Mesh
from ..model import StageModule
from ..plan.placement import holding
from ..plan.plan import Plan
from ..plan.zero import zero_group_of
from .protocol import OptimizerBackend, WholeStates


def backend_for(
    plan: Plan,
    mesh: Mesh,
    stages: Sequence[StageModule],
    named: Sequence[tuple[str, nn.Parameter]],
    make: Callable[[], Optimizer | None],
) -> OptimizerBackend:
    """The holder of what ``make`` makes from the ``named`` parameters of this rank's ``stages``.

    Raises:
        UsageError: Another rank that splits the same states could not make its own.

    """
    members = zero_group_of(plan, mesh.rank)
    if not members:
        return WholeStates(make())
    from .split_states import SplitStates, prepare  # needs DeepSpeed

    group, zero = mesh.groups[members], holding(plan, mesh.places[0])[1].zero
    with _all_or_none(group, mesh.device):
        optimizer = make()
        if optimizer is not None:
            prepare(optimizer, zero, mesh.device)
    if optimizer is None:
        return WholeStates(None)
    if zero == 1:
        return SplitStates.of(named, optimizer, group, mesh.device)
    from .split_gradients import SplitGradients

    return SplitGradients.of(stages[0], optimizer, zero, group, mesh.device)


@contextmanager
def _all_or_none(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """What fails inside on one rank fails on all: the others would wait for it in what comes next."""
    try:
        yield
    except Exception:
        _num_failed(group, device, mine=1)
        raise
    if failed := _num_failed(group, device, mine=0):
        raise UsageError(
            f"{failed} of the {dist.get_world_size(group)} ranks that split their optimizer states could not "
            "make their optimizer; their own errors say why"
        )


def _num_failed(group: dist.ProcessGroup, device: torch.device, *, mine: int) -> int:
    count = torch.tensor(mine, device=device)
    dist.all_reduce(count, group=group)
    return int(count.item())
