"""Which backend holds the optimizer of a rank, by its plan."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..mesh import Mesh
from ..plan.plan import Plan
from ..plan.zero import zero_group_of
from .protocol import OptimizerBackend, WholeStates


def backend_for(
    plan: Plan, mesh: Mesh, named: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer | None
) -> OptimizerBackend:
    """The holder of ``optimizer``, made from the ``named`` parameters of this rank; it may replace them."""
    group = zero_group_of(plan, mesh.rank)
    if optimizer is None or not group:
        return WholeStates(optimizer)
    from .split_states import SplitStates  # needs DeepSpeed

    return SplitStates.of(named, optimizer, mesh.groups[group], mesh.device)
