"""Finds, while a stage runs, what would depend on how a plan splits a batch and no module announces."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.chance import random_states
from ..errors import ModelError, UnsupportedPlanError


def is_watched(step: int) -> bool:
    """Steps 0, 1, 2, 4, 8, ...: what begins late is still found, and over all steps it costs nothing."""
    return step & (step - 1) == 0


@dataclass(frozen=True, slots=True)
class Watch:
    """What is looked at on one rank; a waived check is not made at all."""

    device: torch.device
    buffers: tuple[tuple[str, nn.Module, str], ...]
    """(global name, module, key) of those that are state: the persistent ones."""
    exact: bool
    """Whether random numbers are refused."""

    @classmethod
    def of(cls, stage: nn.Module, device: torch.device, *, exact: bool, once: bool) -> "Watch":
        """Watch a stage; buffers may change where it runs ``once`` a step, on the whole batch."""
        return cls(device, () if once or not exact else tuple(_persistent(stage)), exact)

    @contextmanager
    def forward(self, context: Mapping[str, Tensor], *, random_too: bool) -> Iterator[None]:
        """Refuse what is drawn or changed inside.

        Raises:
            UnsupportedPlanError: Random numbers were drawn, or a persistent buffer was changed.
            ModelError: A tensor of the context was changed in place.

        """
        drawn = self._random_states() if random_too else None
        held = self._held()
        versions = {key: tensor._version for key, tensor in context.items()}
        yield
        self._refuse_changed(held)
        for key, version in versions.items():
            if context[key]._version != version:
                raise ModelError(
                    f"a block changes the context's {key!r} in place, which stages on other ranks would not "
                    "see; work on a copy"
                )
        if drawn is not None and drawn != self._random_states():
            raise UnsupportedPlanError(
                "a forward drew random numbers, so its result would depend on the plan; remove dropout and "
                "noise from the model and the loss, or waive this with stochastic=True"
            )

    def _held(self) -> list[tuple[Tensor | None, int]]:
        tensors = (module._buffers.get(key) for _, module, key in self.buffers)
        return [(tensor, -1 if tensor is None else tensor._version) for tensor in tensors]

    def _refuse_changed(self, before: Sequence[tuple[Tensor | None, int]]) -> None:
        for (name, _, _), old, new in zip(self.buffers, before, self._held(), strict=True):
            if old[0] is not new[0] or old[1] != new[1]:
                raise UnsupportedPlanError(
                    f"a forward changes the buffer {name}, so it would depend on the plan how often and with "
                    "which samples; register it with persistent=False if it only caches, give its stage one "
                    "replica, one micro-batch and no recomputation, or waive this with stochastic=True"
                )

    def _random_states(self) -> tuple[object, ...]:
        if self.device.type != "cuda":
            return random_states()
        return *random_states(), torch.cuda.get_rng_state(self.device).numpy().tobytes()


def _persistent(stage: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in stage.named_modules():
        for key in module._buffers:
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}", module, key
