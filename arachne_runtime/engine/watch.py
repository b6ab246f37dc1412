"""Finds, while a stage runs, what would depend on how a plan splits a batch and no module announces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import num_rows_of, slice_rows
from ..data.chance import random_states
from ..errors import ModelError, UnsupportedPlanError, UsageError

_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest rounding of a loss, of its size, between all rows and parts of them; for others see below."""
_HALF_TOLERANCE = 0.03
"""For dtypes of 16 bits: their epsilon is 0.0078 (bfloat16)."""


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
    """Whether random numbers are refused, and a loss must be a mean (or sum) over its rows."""
    whole: bool
    """Whether this stage sees the whole global batch in one micro-batch, so that statistics are right."""

    @classmethod
    def of(cls, stage: nn.Module, device: torch.device, *, exact: bool, whole: bool) -> "Watch":
        """Watch a stage; buffers are not looked at where they may change."""
        return cls(device, () if whole or not exact else tuple(_persistent(stage)), exact, whole)

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

    def refuse_loss(
        self,
        loss: Callable[[Any, Any], Tensor],
        outputs: tuple[Tensor, ...],
        samples: Any,
        of_all: Tensor,
        *,
        is_sum: bool,
    ) -> None:
        """Refuse a loss that is not the mean (or sum) over its rows, by a look at two parts of them.

        A batch or output that cannot be cut by rows, a loss that fails on fewer, or one that is not finite
        tells nothing.
        """
        parts = self._parts(loss, outputs, samples)
        if parts is None or not of_all.isfinite():
            return
        weights = [1.0 if is_sum else count / sum(n for n, _ in parts) for count, _ in parts]
        expected = sum(weight * value for weight, (_, value) in zip(weights, parts, strict=True))
        size = max(abs(value) for _, value in parts)
        found = float(of_all)
        if abs(found - expected) <= _TOLERANCES.get(of_all.dtype, _HALF_TOLERANCE) * size:
            return
        (a, of_a), (b, of_b) = parts
        kind, way = ("sum", "without num_items it would be a mean") if is_sum else (
            "mean", "for a mean over tokens return their sum and count them with num_items=")  # fmt: skip
        raise ModelError(
            f"loss(output, batch) is not the {kind} over its rows: {of_a:g} for the first of {a + b} and "
            f"{of_b:g} for the others, but {found:g} for all ({expected:g} expected), so training would "
            f"depend on the plan; {way}, or waive this with stochastic=True"
        )

    def _parts(
        self, loss: Callable[[Any, Any], Tensor], outputs: tuple[Tensor, ...], samples: Any
    ) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """Rows and loss of the first row and of the others."""
        try:
            count = num_rows_of(samples)
        except UsageError:
            return None
        if count < 2 or any(tensor.shape[:1] != (count,) for tensor in outputs):
            return None

        def of(rows: range) -> tuple[int, float]:
            part = tuple(tensor[rows.start : rows.stop].detach() for tensor in outputs)
            value = loss(part[0] if len(part) == 1 else part, slice_rows(samples, rows, count))
            return len(rows), float(value)

        try:
            with torch.no_grad():
                return of(range(1)), of(range(1, count))
        except Exception:  # whatever the user's code raises for a batch that it was not made for
            return None

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
