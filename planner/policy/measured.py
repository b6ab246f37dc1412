"""Seconds and bytes of a whole model on one tensor-parallel group, from figures by kind of block.

Prefix sums over blocks (``planner.cost.tables``) would be exact but take a hundred times as long; features
need no more than this.
"""

from dataclasses import dataclass

from arachne_runtime.plan.model import BlockSpec
from arachne_runtime.plan.profile import TpCommunication
from arachne_runtime.units import Bytes, Seconds

from ..catalog.collectives import num_collectives, summed_bytes
from ..cost.links import Link
from ..cost.tables import ring_seconds
from ..request import Request


@dataclass(frozen=True, slots=True)
class Whole:
    """All blocks of a model, on one group."""

    seconds: Seconds
    """Forward and backward of one micro-batch."""
    kept_bytes: float
    """What a device of the group keeps of one micro-batch for the backward."""


@dataclass(frozen=True, slots=True)
class _Kind:
    block: BlockSpec
    count: int
    collectives: int
    """All-reduces in each direction (``Tables.costs``)."""
    width_bytes: Bytes
    """What each of them sums, a sample."""


class Measured:
    """One request's model by kinds of blocks."""

    def __init__(self, request: Request) -> None:
        self.request = request
        blocks = request.model.blocks
        names = [block.kind for block in blocks]
        self.kinds: list[_Kind] = []
        for name in dict.fromkeys(names):
            i = names.index(name)
            count, width = num_collectives(request.model, i), summed_bytes(request.model, i)
            self.kinds.append(_Kind(blocks[i], names.count(name), count, width))

    @property
    def num_alike(self) -> int:
        """Blocks of the commonest kind."""
        return max(kind.count for kind in self.kinds)

    def whole(self, device: str, link: Link, tp: int, samples: int) -> Whole:
        """Of ``samples`` on ``tp`` devices of a type that are joined by ``link``."""
        seconds = kept = 0.0
        excluded = self.request.profile.tp_communication is TpCommunication.EXCLUDED
        for kind in self.kinds:
            cost = self.request.profile.block(kind.block.kind, device, tp, samples)
            seconds += kind.count * (cost.forward_s + cost.backward_s)
            if excluded and tp > 1:
                ring = ring_seconds(link, samples * kind.width_bytes, tp)
                seconds += 2 * kind.count * kind.collectives * ring
            held = cost.activation_bytes
            kept += kind.count * (kind.block.activation_bytes * samples / tp if held is None else held)
        return Whole(seconds, kept)

    def heaviest(self, device: str, tp: int, samples: int) -> float:
        """Seconds of the heaviest block over those of all: no cut makes stages finer."""
        costs = [self.request.profile.block(k.block.kind, device, tp, samples) for k in self.kinds]
        each = [cost.forward_s + cost.backward_s for cost in costs]
        return max(each) / sum(s * k.count for s, k in zip(each, self.kinds, strict=True))
