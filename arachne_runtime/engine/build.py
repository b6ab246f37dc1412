"""Builds what a rank trains with, on the groups of its mesh: stages, optimizer, and sums of gradients."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..backends.choice import backend_for
from ..backends.protocol import GradientSums, OptimizerBackend
from ..mesh import Mesh
from ..model import ModelParts, StageModule
from ..model.experts import place_experts
from ..model.parameters import Values
from ..plan.placement import holding
from ..plan.plan import Plan
from .compiled import backend_of, compile_blocks, refuse_compiled
from .gradients import Gradients
from .optimizer_rule import refuse_optimizer
from .play import Play
from .precision import Accumulation, refuse_parameters
from .recipe import Recipe
from .shard_rule import shard_rule_of
from .sharing import sharing_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The stages of one rank and all that works on their parameters."""

    stages: Sequence[StageModule]
    """One for each place."""
    accumulation: Accumulation
    backend: OptimizerBackend
    gradients: GradientSums
    plays: Mapping[int, Play]
    """By stage."""

    @classmethod
    def of(
        cls, plan: Plan, parts: ModelParts, recipe: Recipe, mesh: Mesh,
        *, device: torch.device, values: Values | None, overlap: bool, undo: ExitStack,
    ) -> "Built":  # fmt: skip
        """Build all; ``undo`` gets what is to be done should anything fail afterwards."""
        places = mesh.places
        spans = [holding(plan, place)[1].blocks for place in places]
        shared = sharing_of(mesh, plan, recipe)
        stages = parts.stages(
            spans, device=device, seed=recipe.seed, dtype=recipe.dtype, sharing=shared, values=values
        )
        for place, stage in zip(places, stages, strict=True):
            place_experts(stage, mesh.experts[place.stage])
        accumulation = _prepare_dtypes(plan, recipe, stages)
        trained = [(name, p) for name, p in named_parameters(stages) if p.requires_grad]
        make = partial(_make_optimizer, plan, recipe, [p for _, p in trained])
        backend = backend_for(plan, mesh, stages, trained, make)
        undo.callback(backend.close)
        gradients = backend.sums or Gradients.of(stages, mesh)
        context = parts.context_on(device, recipe.dtype)
        plays = {
            place.stage: Play.of(
                plan, place, recipe, stage, device=device, context=context, sharing=each,
                pieces=gradients.pieces(stage) if overlap else (stage.block_range,),
                shard_rule=shard_rule_of(parts, stage, each),
            )
            for place, stage, each in zip(places, stages, shared, strict=True)
        }  # fmt: skip
        return cls(
            stages=stages, accumulation=accumulation, backend=backend, gradients=gradients, plays=plays
        )


def named_parameters(stages: Sequence[StageModule]) -> Iterator[tuple[str, nn.Parameter]]:
    """Global name and parameter of all that stages hold, by block; those that blocks share last."""
    for stage in stages:
        for block in stage.block_range:
            yield from stage.block_parameters(block)
    yield from {name: p for stage in stages for name, p in stage.tied_parameters()}.items()


def _prepare_dtypes(plan: Plan, recipe: Recipe, stages: Sequence[StageModule]) -> Accumulation:
    """What must be before gradients are packed and the first block is called."""
    refuse_parameters(recipe.precision, named_parameters(stages))
    backend = backend_of(recipe.compile)
    refuse_compiled(plan, backend)
    if backend is not None:
        for stage in stages:
            compile_blocks(stage, backend)
    return Accumulation.of(recipe.accumulate, (p for _, p in named_parameters(stages)))


def _make_optimizer(
    plan: Plan, recipe: Recipe, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer | None:
    if not parameters:
        return None
    made = recipe.optimizer(list(parameters))
    refuse_optimizer(made, recipe.optimizer, parameters[0], plan, stochastic=recipe.stochastic)
    return made
