"""Which backend holds the optimizer of a rank, by its plan."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

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
    optimizer: Optimizer | None,
) -> OptimizerBackend:
    """The holder of ``optimizer``, made from the ``named`` parameters of the ``stages`` of this rank."""
    group = zero_group_of(plan, mesh.rank)
    if optimizer is None or not group:
        return WholeStates(optimizer)
    zero = holding(plan, mesh.places[0])[1].zero
    if zero > 1:
        from .split_gradients import SplitGradients

        return SplitGradients.of(stages[0], optimizer, zero, mesh.groups[group], mesh.device)
    from .split_states import SplitStates  # needs DeepSpeed

    return SplitStates.of(named, optimizer, mesh.groups[group], mesh.device)
