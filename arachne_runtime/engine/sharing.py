"""How the stages of a rank are shared out in their replicas, and the loss over what is left apart."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..mesh import Mesh
from ..model.sharing import Sharing
from ..model.vocabulary import sharded_logits, takes_shards
from ..plan.placement import holding
from ..plan.plan import Plan
from .recipe import Loss, Recipe

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


def loss_over(loss: Loss, tensor: "TensorGroup | None") -> Loss:
    """The user's loss, told which words of the logits this rank has where they were left apart."""
    shard = tensor.logits if tensor is not None else None
    if shard is None:
        return loss

    def of_shard(output: Any, batch: Any) -> Tensor:
        with sharded_logits(shard):
            return loss(output, batch)

    return of_shard


def _group(mesh: Mesh, stage: int) -> "TensorGroup":
    from ..model.tensor_parallel import TensorGroup  # torch's DTensor is not even imported without a group

    return TensorGroup(mesh.tensor[stage], mesh.device.type)
