"""Finds a block that gives another result shared out than whole: a number of heads that no rule divides."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.chance import random_states_kept
from ..errors import UnsupportedPlanError
from ..model import ModelParts, StageModule
from ..model.sharing import Sharing
from ..plan.shards import ParameterForm, boxes, held
from .mixing import Boundary, TwoRows
from .shard_gradients import GradientRule
from .tolerance import tolerance_of

if TYPE_CHECKING:
    from ..model.tensor_parallel import TensorGroup


@dataclass(slots=True)
class ShardRule:
    """Looks once at each kind of block of a stage that is shared out, with the whole block beside it."""

    parts: ModelParts
    stage: StageModule
    sharing: Sharing
    tensor: "TensorGroup"
    _open: set[str] = field(init=False)
    """Kinds that were not looked at."""

    def __post_init__(self) -> None:
        self._open = {self.parts.kinds[block] for block in self.stage.block_range}

    @property
    def is_open(self) -> bool:
        """Whether there is anything left to look at."""
        return bool(self._open)

    def refuse(self, two: TwoRows) -> None:
        """Run the blocks on two rows; UnsupportedPlanError on all ranks of the replica for one that differs.

        A block that fails on them tells nothing, nor do those behind it. Those with experts are passed by:
        they exchange rows with other replicas, which look at nothing, or at another time.
        """
        inputs = two.inputs
        for block in self.stage.block_range:
            if not self.parts.may_be_whole(block):
                continue
            shared = self._run(self.stage, block, inputs, two)
            if shared is None:
                return
            if self.parts.kinds[block] in self._open:
                self._open.discard(self.parts.kinds[block])
                whole = self.parts.rebuilt(block, self._gathered(block), like=inputs)
                alone = self._run(whole, block, inputs, two)
                if alone is not None:
                    if gap := self._furthest(shared, alone, block):
                        raise UnsupportedPlanError(self._told(block, gap))
                    self._gradient_rule(block).refuse(self.stage, whole, two.context, inputs)
            inputs = shared
        self._open.clear()

    def _gradient_rule(self, block: int) -> GradientRule:
        infos = [info for info in self.parts.parameters_of(block) if info.requires_grad and not info.splits]
        logits = self.tensor.logits if block == self.sharing.keeps_logits_of else None
        return GradientRule(
            block=block,
            infos=infos,
            group=self.tensor.peers.group,
            degree=self.tensor.degree,
            words=None if logits is None else (logits.words, sum(logits.sizes)),
        )

    def _run(self, stage: StageModule, block: int, inputs: Boundary, two: TwoRows) -> Boundary | None:
        """None where the block fails, which tells nothing: all ranks of the replica do the same."""
        try:
            with torch.no_grad(), random_states_kept():
                copies = tuple(tensor.clone() for tensor in inputs)
                outputs: Boundary = stage(copies, two.context, range(block, block + 1))
                return outputs
        except Exception:  # whatever the user's code raises for rows that it was not made for
            return None

    def _gathered(self, block: int) -> dict[str, Tensor]:
        """The whole parameters of a block by global name, from all ranks of the replica."""
        named = dict(self.stage.block_parameters(block)) | dict(self.stage.tied_parameters())
        infos = self.parts.parameters_of(block)
        return {info.name: self._gather(info.form, named[info.tie or info.name]) for info in infos}

    def _gather(self, form: ParameterForm, mine: nn.Parameter) -> Tensor:
        if not form.splits:
            return mine.detach()
        degree = self.tensor.degree
        position = self.sharing.position
        parts = [held(form, replace(position, tensor=(i, degree))) for i in range(degree)]
        shapes = [tuple(sum(map(len, runs)) for runs in part) for part in parts]
        most = max(map(prod, shapes))
        sent = nn.functional.pad(mine.detach().flatten(), (0, most - mine.numel()))
        found = [torch.empty_like(sent) for _ in parts]
        peers = self.tensor.peers
        dist.all_gather([found[index] for index in peers.by_rank], sent, group=peers.group)
        whole = mine.new_empty(form.shape)
        everything = tuple((range(length),) for length in form.shape)
        for flat, shape, part in zip(found, shapes, parts, strict=True):
            local = flat[: prod(shape)].view(shape)
            for here, there in boxes(part, everything):
                whole[there] = local[here]
        return whole.detach()

    def _furthest(self, shared: Boundary, whole: Boundary, block: int) -> float:
        """Largest difference of any rank, by the size of the result; 0 where it is rounding."""
        gap = 0.0
        for a, b in zip(shared, whole, strict=True):
            words = self.tensor.logits.words if self.tensor.logits is not None else None
            if words is not None and block == self.sharing.keeps_logits_of:
                b = b[..., words.start : words.stop]
            gap = max(gap, _gap(a, b))
        worst = torch.tensor(gap, device=shared[0].device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.tensor.peers.group)
        return float(worst)

    def _told(self, block: int, gap: float) -> str:
        kind = type(self.stage.blocks[str(block)]).__name__
        return (
            f"block {block} ({kind}) gives another result on {self.tensor.degree} tensor-parallel ranks than "
            f"whole (by {gap:.2g} of its size); its forward may read a number that the degree divides (name "
            "it in pipelined(divides=...)), need heads that are not cut (arachne.Colwise(heads=...)), or a "
            "rule may lack its counterpart (colwise before rowwise); or waive this with stochastic=True"
        )


def shard_rule_of(parts: ModelParts, stage: StageModule, sharing: Sharing) -> ShardRule | None:
    """None where the stage is on one device."""
    return None if sharing.tensor is None else ShardRule(parts, stage, sharing, sharing.tensor)


def _gap(shared: Tensor, whole: Tensor) -> float:
    if shared.shape != whole.shape:
        return float("inf")
    a, b = (
        tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (shared, whole)
    )
    if not b.numel() or not b.isfinite().all():
        return 0.0
    size, difference = float(b.abs().max()), float((a - b).abs().max())
    return (
        0.0
        if difference <= tolerance_of(whole.dtype, whole.device) * size
        else difference / max(size, 1e-300)
    )
