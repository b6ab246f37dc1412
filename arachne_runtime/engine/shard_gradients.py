"""Finds a parameter whose gradient is another one shared out than whole, though the result is the same.

A norm of q that no rule names is whole on every device and works on this one's heads: each device then has a
part of its gradient, and the engine would take one of them for all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.chance import random_states_kept
from ..errors import UnsupportedPlanError
from ..model import ParameterInfo, StageModule
from .precision import as_single, is_half
from .tolerance import tolerance_of

Boundary = tuple[Tensor, ...]
Words = tuple[range, int]
"""Those of a device, out of how many."""

_ROUNDINGS = 4
"""A gradient sums up more products than a result: so many times its tolerance."""
_SMALLEST = 0.05
"""Of the largest gradient: what is smaller may be rounding alone (the bias of k has none but for that)."""
_INPUT = "its input"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRule:
    """One block on one device of a replica."""

    block: int
    infos: Sequence[ParameterInfo]
    """Its parameters that train and are whole on every device."""
    group: dist.ProcessGroup
    degree: int
    words: Words | None
    """Which of how many logits this device has, where they are left apart."""

    def refuse(
        self, shared: StageModule, whole: StageModule, context: Mapping[str, Tensor], inputs: Boundary
    ) -> None:
        """UnsupportedPlanError on all devices of the replica, for the first that differs on any.

        A block that fails tells nothing: it does on all of them.
        """
        try:
            found = self._gradients(shared, self._held(shared, tied=True), context, inputs, self.words)
            wanted = self._gradients(whole, self._held(whole, tied=False), context, inputs, None)
        except Exception:  # whatever the user's code raises where it is called alone
            return
        if not found or found.keys() != wanted.keys():
            return
        partial = {info.name for info in self.infos if info.partial}
        for name in found:
            if name in partial:
                dist.all_reduce(found[name], group=self.group)
        gaps = torch.tensor(list(_gaps(found, wanted)), dtype=torch.float64, device=inputs[0].device)
        dist.all_reduce(gaps, dist.ReduceOp.MAX, group=self.group)
        for name, gap in zip(found, gaps.tolist(), strict=True):
            if gap > 0:
                raise UnsupportedPlanError(self._told(name, gap, is_partial=name in partial))

    def _held(self, stage: StageModule, *, tied: bool) -> dict[str, Tensor]:
        """By global name; ``tied`` ones have the name of their tie in a stage of the model."""
        named = dict(stage.block_parameters(self.block)) | dict(stage.tied_parameters())
        return {info.name: named[(info.tie or info.name) if tied else info.name] for info in self.infos}

    def _gradients(
        self,
        stage: StageModule,
        held: dict[str, Tensor],
        context: Mapping[str, Tensor],
        inputs: Boundary,
        words: Words | None,
    ) -> dict[str, Tensor]:
        """Of one number made of the outputs, by name; zeros where it does not depend on a parameter."""
        device = inputs[0].device
        kind, is_mixed = device.type, torch.is_autocast_enabled(device.type)
        with torch.enable_grad(), random_states_kept(), torch.autocast(kind, enabled=False):
            entered = tuple(as_single(t) if is_mixed else t for t in inputs)
            leaves = tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in entered)
            entered = tuple(t.clone() for t in leaves)
            outputs = stage(entered, context, range(self.block, self.block + 1))
            numbers = [_number(output, words) for output in outputs if output.requires_grad]
            named = held | {_INPUT: leaves[0]} if leaves[0].requires_grad else held
            if not numbers or not named:
                return {}
            total = torch.stack(numbers).sum()
            given = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
            for (name, tensor), gradient in zip(named.items(), given, strict=True)
        }

    def _told(self, name: str, gap: float, *, is_partial: bool) -> str:
        other = f"by {gap:.2g} of its size"
        if is_partial:
            return (
                f"block {self.block}: the gradients of {name} on {self.degree} tensor-parallel ranks add up "
                f"to another than that of the whole block ({other}), so it does not work on a part of the "
                'features; take the rule "partial" from it, or waive this with stochastic=True'
            )
        return (
            f"block {self.block}: {name} has another gradient on {self.degree} tensor-parallel ranks than in "
            f"the whole block ({other}), though the result is the same: what is whole on every rank works on "
            'a part of the features there; give its module the rule "partial" in '
            "pipelined(tensor_parallel=...), or waive this with stochastic=True"
        )


def _number(output: Tensor, words: Words | None) -> Tensor:
    """A sum with weights that depend on the place in the whole output alone."""
    shape = torch.Size((*output.shape[:-1], words[1])) if words is not None else output.shape
    weights = torch.cos(0.7 * torch.arange(shape.numel(), dtype=torch.float64)).view(shape)
    if words is not None:
        weights = weights[..., words[0].start : words[0].stop]
    return (output * weights.to(device=output.device, dtype=output.dtype)).sum().real


def _gaps(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[float]:
    """How far each is from what it should be, of its size; 0 where that may be rounding."""
    largest = max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)
    for name, gradient in found.items():
        right = wanted[name]
        if not right.numel() or not right.isfinite().all():
            yield 0.0
            continue
        size, gap = float(right.abs().max()), float((gradient - right).abs().max())
        floor = largest * (1.0 if is_half(right.dtype) else _SMALLEST)
        yield (
            0.0
            if gap <= _ROUNDINGS * tolerance_of(right.dtype) * max(size, floor)
            else gap / max(size, floor)
        )
