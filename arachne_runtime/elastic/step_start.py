"""What a forward changes for good, as it was when a step began, so that the step can be computed again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engine import Engine
from ..state.job import RandomState


@dataclass(frozen=True, slots=True)
class StepStart:
    """Buffers, and where nothing forbids to draw, the random states."""

    number: int
    """Steps done before it."""
    device: torch.device
    buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]
    """Of each: its module and name, the tensor itself, and a copy of its values."""
    random: RandomState | None

    @classmethod
    def of(cls, engine: Engine) -> "StepStart":
        """Now, between two steps."""
        held = [
            (module, name, buffer, buffer.detach().clone())
            for stage in engine.stages
            for module in stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        random = RandomState.here(engine.device) if engine.recipe.stochastic else None
        return cls(engine.num_steps, engine.device, held, random)

    def give_back(self) -> None:
        """Make all as it was."""
        for module, name, buffer, values in self.buffers:
            with torch.no_grad():
                buffer.copy_(values)
            module._buffers[name] = buffer
        if self.random is not None:
            self.random.restore(self.device)
