"""How many tokens reach the experts of a device, for its memory: a bound, since the router decides.

What was measured of a block is that of a device which sends its own tokens to experts of its own. In a tile
of EP x ETP devices each gets an EP-th of all their tokens if experts are loaded alike, and ETP devices get
the same ones, of which each computes a part of the inner width.
"""

from dataclasses import dataclass
from math import ceil

from msgspec.structs import replace

from arachne_runtime.plan.plan import Replica, Stage
from arachne_runtime.plan.profile import WorkingBytes

IMBALANCE = 1.5
"""Most tokens that the experts of a device are taken to get, over an equal load."""


ORDER_BYTES = 2 * 8
"""By row that comes from several devices: its place among those of its expert, and the way back."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A device among those that share experts out."""

    tile: int = 1
    """Devices that hold every expert once (EP x ETP)."""
    tensor: int = 1
    """Devices that hold parts of the same experts (ETP)."""
    load: float = 1.0
    """Tokens at its experts over those that it sends, times their part of the inner width; 1 at least."""

    def kept(self, kept: float, routed: float, rows: float) -> float:
        """Bytes of a block from forward to backward; ``routed``: its ``rows`` for experts, 0 without any."""
        order = ORDER_BYTES * rows * self.load * self.tensor
        return kept * self.load + self._copies(routed) + order if routed else kept

    def working(self, row: WorkingBytes, routed: float, expert_gradients: float) -> WorkingBytes:
        """Most bytes that the block needs beside, with gradients of its own experts only."""
        if not routed:
            return row
        more, others = 2 * self._copies(routed), expert_gradients * (1 - 1 / self.tile)
        scaled = {
            name: ceil(getattr(row, name) * self.load + more)
            for name in ("backward", "forward", "recomputed")
            if getattr(row, name)
        }
        made = max(0.0, row.first_backward - row.backward - others)
        return replace(row, **scaled, first_backward=ceil(scaled.get("backward", row.backward) + made))

    def _copies(self, routed: float) -> float:
        """Of tokens that other devices compute too, each in part."""
        return routed * self.load * (self.tensor - 1)


WHOLE_EXPERTS = Tiling()
"""A device that holds all experts of its blocks."""


def tiling_of(stage: Stage, replica: Replica) -> Tiling:
    """Of a device of a replica: the most loaded of its tiles."""
    tile = stage.expert_parallel * stage.expert_tensor
    if tile == 1:
        return WHOLE_EXPERTS
    sent = [r.share / len(r.devices) for r in stage.replicas for _ in r.devices]
    mine = [i for i, device in enumerate(stage.devices) if device in replica.devices]
    groups = {i // tile for i in mine}
    most = max(sum(sent[group * tile : (group + 1) * tile]) / tile for group in groups)
    uneven = min(IMBALANCE, stage.expert_parallel) if stage.expert_parallel > 1 else 1.0
    return Tiling(tile, stage.expert_tensor, max(1.0, uneven * most / sent[mine[0]]))
