"""How the stages of a rank are shared out in their replicas."""

from typing import TYPE_CHECKING

from ..mesh import Mesh
from ..model.sharing import Sharing
from ..model.vocabulary import takes_shards
from ..plan.placement import holding
from ..plan.plan import Plan
from .recipe import Recipe

if TYPE_CHECKING:
    from ..model.tensor_parallel import TensorGroup


def sharing_of(mesh: Mesh, plan: Plan, recipe: Recipe) -> tuple[Sharing, ...]:
    """By place of this rank."""
    groups = {stage: _group(mesh, stage) for stage in mesh.tensor}
    return tuple(
        Sharing(
            position=mesh.position_at(holding(plan, place)[1].blocks),
            tensor=groups.get(place.stage),
            keeps_logits_of=plan.num_blocks - 1 if takes_shards(recipe.loss) else None,
        )
        for place in mesh.places
    )


def _group(mesh: Mesh, stage: int) -> "TensorGroup":
    from ..model.tensor_parallel import TensorGroup  # torch's DTensor is not even imported without a group

    return TensorGroup(mesh.tensor[stage], mesh.device.type)
