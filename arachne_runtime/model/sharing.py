"""Which part of its blocks one rank holds, and with whom it runs them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..plan.shards import Position, held_runs
from .layout import Block
from .rules import Cut, Rules

if TYPE_CHECKING:
    from .tensor_parallel import TensorGroup
    from .vocabulary import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a stage is shared out among the devices of a replica."""

    position: Position = field(default_factory=Position)
    tensor: "TensorGroup | None" = None
    """The devices of the replica; None: this one alone."""
    keeps_logits_of: int | None = None
    """The block whose logits stay apart, each rank's words for itself, since the loss takes them so."""

    @property
    def logits(self) -> "Shard | None":
        """Which words of the logits this rank has, once its head was built and where they stay apart."""
        return None if self.tensor is None else self.tensor.logits

    def part(self, value: Tensor, cut: Cut | None) -> Tensor:
        """What is here of a whole parameter."""
        for split in cut.splits if cut is not None else ():
            runs = held_runs(split, self.position)
            value = torch.cat([value.narrow(split.dim, run.start, len(run)) for run in runs], split.dim)
        return value

    def apply(self, block: Block, whole: Block, rules: Rules) -> None:
        """Make the modules of a copy run together with those of the other devices."""
        if self.tensor is not None:
            from .tensor_parallel import share_out  # torch's DTensor is not even imported without a group

            share_out(block, whole, rules, self.tensor, keeps_logits=block.index == self.keeps_logits_of)


ALONE = Sharing()
"""A stage of whole blocks."""
