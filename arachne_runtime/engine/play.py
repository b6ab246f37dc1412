"""How one stage of a plan is played: what stays the same from step to step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model import StageModule
from ..model.sharing import Sharing
from ..model.vocabulary import over_shard
from ..plan.placement import Place, holding
from ..plan.plan import Plan
from ..plan.schedule import Work, first_backward
from .loss_rule import LossRule
from .precision import Precision
from .recipe import Inputs, Loss, Recipe
from .refusals import runs_once, sees_whole_batch
from .shard_rule import ShardRule
from .watch import Watch

Context = Callable[[Any], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How a stage is played: the same for every step."""

    index: int
    """Of the stage in its pipeline."""
    stage: StageModule
    pieces: tuple[range, ...]
    """Runs of blocks, ascending, behind each of which a sum of gradients may start."""
    device: torch.device
    is_first: bool
    is_last: bool
    recompute: bool
    defers: bool
    """Whether backwards are split: first gradients of what entered the stage, then those of its weights."""
    stochastic: bool
    seed: int
    """Of the training."""
    loss: Loss
    inputs: Inputs
    context: Context | None
    watch: Watch
    splits: bool
    """Whether a micro-batch here is only a part of the global batch."""
    loss_rule: LossRule
    shard_rule: ShardRule | None
    """Of a stage that is shared out in its replica."""
    precision: Precision | None
    compiled: bool

    @classmethod
    def of(
        cls,
        plan: Plan,
        place: Place,
        recipe: Recipe,
        stage: StageModule,
        *,
        pieces: tuple[range, ...],
        device: torch.device,
        context: Context | None,
        sharing: Sharing,
        shard_rule: ShardRule | None,
    ) -> "Play":
        """The stage at one place of a plan, trained by a recipe."""
        pipeline, mine, _ = holding(plan, place)
        loss = over_shard(recipe.loss, sharing.logits)
        exact, once = not recipe.stochastic, runs_once(plan, mine)
        return cls(
            index=place.stage,
            stage=stage,
            pieces=pieces,
            device=device,
            is_first=place.stage == 0,
            is_last=place.stage == len(pipeline.stages) - 1,
            recompute=mine.recompute,
            defers=first_backward(plan.schedule) is Work.INPUT,
            stochastic=recipe.stochastic,
            seed=recipe.seed,
            loss=loss,
            inputs=recipe.inputs,
            context=context,
            watch=Watch.of(stage, device, exact=exact, once=once),
            splits=not sees_whole_batch(plan, mine),
            loss_rule=LossRule(loss, is_sum=recipe.num_items is not None),
            shard_rule=shard_rule,
            precision=recipe.precision,
            compiled=recipe.compile is not False,
        )

    @property
    def needs_samples(self) -> bool:
        """Whether the stage reads the batch itself."""
        return self.is_first or self.is_last or self.context is not None
