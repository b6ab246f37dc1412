"""Makes the engines of a session: one training, by any plan."""

from dataclasses import dataclass

import torch

from .engine import Engine, Recipe
from .engine.noise import is_noise_seen
from .measure.hooks import Hooks
from .model import ModelParts
from .model.parameters import Values
from .plan.plan import Plan
from .units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMaker:
    """What the engines of a training have in common."""

    parts: ModelParts
    recipe: Recipe
    device: torch.device
    hooks: Hooks
    overlap: bool
    noise: bool
    follows_plans: bool = False
    """Whether others choose the plan: where that shows no noise, there is no reading of it."""

    def __call__(
        self, plan: Plan, rank: int, values: Values | None = None, *, form_s: Seconds | None = None
    ) -> Engine:
        """The engine of this process, which is ``rank`` of the plan."""
        records, on_step = self.hooks(plan, rank)
        noise = self.noise and (not self.follows_plans or is_noise_seen(plan, self.parts.summed()))
        try:
            return Engine(
                plan, self.parts, self.recipe, device=self.device, recorder=records, on_step=on_step,
                overlap=self.overlap, noise=noise, values=values, form_s=form_s,
            )  # fmt: skip
        except BaseException:
            records.close()
            raise
