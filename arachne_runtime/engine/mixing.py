"""Finds a block whose result for a sample depends on the samples beside it, which another plan would change.

The first sample of a micro-batch runs beside itself, and beside another: what comes out for it must be the
same. Both runs have two rows, so that they round alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..data.chance import random_states, random_states_kept
from ..errors import UnsupportedPlanError
from ..model import StageModule
from ..model.experts import experts_alone
from .tolerance import tolerance_of

Boundary = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class TwoRows:
    """The first and the last sample of a micro-batch (one may be both), as a stage takes them."""

    inputs: Boundary
    context: Mapping[str, Tensor]

    def refuse_mixing(self, stage: StageModule) -> None:
        """Run the blocks on them; UnsupportedPlanError for one that mixes samples.

        A block that fails on two rows tells nothing, nor do those behind it.
        """
        same, other = tuple(map(_beside_itself, self.inputs)), tuple(map(_beside_another, self.inputs))
        for block in stage.block_range:
            run = partial(_run, stage, block, self.context)
            of_same, of_other = run(same), run(other)
            if of_same is None or of_other is None:
                return
            if (difference := _difference(of_same, of_other)) > 0:
                again = run(same)
                mixes = again is None or _difference(of_same, again) == 0
                raise UnsupportedPlanError(_told(stage, block, difference, mixes=mixes))
            same, other = _next(of_same, of_other)


def _run(stage: StageModule, block: int, context: Mapping[str, Tensor], inputs: Boundary) -> Boundary | None:
    """One block on copies; None where it fails, or draws random numbers, of which the watch tells."""
    try:
        with torch.no_grad(), random_states_kept(), experts_alone():
            before = random_states()
            outputs = stage(tuple(tensor.clone() for tensor in inputs), context, range(block, block + 1))
            return outputs if random_states() == before else None
    except Exception:  # whatever the user's code raises for rows that it was not made for
        return None


def _beside_itself(tensor: Tensor) -> Tensor:
    return tensor[[0, 0]] if _has_rows(tensor) else tensor


def _beside_another(tensor: Tensor) -> Tensor:
    """The first row, and one made of the last: with the values it has, in another order and half as large."""
    if not _has_rows(tensor):
        return tensor
    last = tensor[1:].flip(tuple(range(1, tensor.dim())))
    return torch.cat((tensor[:1], last * 0.5 if last.is_floating_point() or last.is_complex() else last))


def _next(same: Boundary, other: Boundary) -> tuple[Boundary, Boundary]:
    """What the next block takes: the first row must be exactly the same again.

    Where the rows are in another dim, both go on as they are, to be compared when rows come first again.
    """
    apart = tuple(_beside_another(s) if _has_rows(s) else o for s, o in zip(same, other, strict=True))
    return tuple(map(_beside_itself, same)), apart


def _has_rows(tensor: Tensor) -> bool:
    return tensor.shape[:1] == (2,)


def _difference(same: Boundary, other: Boundary) -> float:
    """Largest difference in the first row, of the row's size, where it is more than rounding; else 0."""
    pairs = [(s, o) for s, o in zip(same, other, strict=False) if _has_rows(s) and s.shape == o.shape]
    return max((_difference_of(s[0], o[0]) for s, o in pairs), default=0.0)


def _difference_of(same: Tensor, other: Tensor) -> float:
    a, b = (tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (same, other))
    if not a.numel() or not a.isfinite().all():
        return 0.0
    size, difference = float(a.abs().max()), float((a - b).abs().max())
    return (
        0.0 if difference <= tolerance_of(same.dtype, same.device) * size else difference / max(size, 1e-300)
    )


def _told(stage: StageModule, block: int, difference: float, *, mixes: bool) -> str:
    what = f"block {block} ({type(stage.blocks[str(block)]).__name__}) gives a sample another result"
    by = f"(by {difference:.2g} of its size), so training would depend on how the plan splits a batch"
    if not mixes:
        return (
            f"{what} when it is called again {by}: it counts its calls, or keeps what it saw; let it depend "
            "on its input and its parameters alone, or waive this with stochastic=True"
        )
    return (
        f"{what} when another sample is beside it {by}; take statistics within a sample (LayerNorm, "
        "GroupNorm; attention with batch_first=True), give the model one pipeline, its stages one replica, "
        "and the step one micro-batch, or waive this with stochastic=True"
    )
