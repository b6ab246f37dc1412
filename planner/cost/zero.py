"""What ZeRO sends beside the sums of gradients (arXiv 1910.02054, §7), and how much of it the blocks hide.

1: weights are gathered after the optimizer. 2: gradients are summed and scattered in every backward.
3: weights are gathered for every forward and backward, and not after the optimizer.
"""

from dataclasses import dataclass

from arachne_runtime.plan.plan import Stage
from arachne_runtime.units import Seconds

from .rings import Ring
from .seats import Seat
from .tables import Tables


@dataclass(frozen=True, slots=True)
class ZeroTraffic:
    """Seconds of a stage's own collectives, each as if nothing else ran."""

    gather_s: Seconds
    """Weights to all replicas, once."""
    scatter_s: Seconds
    """Sums of gradients, to each its part, once."""

    @classmethod
    def of(cls, stage: Stage, seats: tuple[Seat, ...], tables: Tables) -> "ZeroTraffic":
        """No traffic without ZeRO."""
        if not stage.zero:
            return cls(0.0, 0.0)
        start, stop = stage.layers
        sizes = tables.model.bytes_per_parameter
        experts = tables.expert_parameters[stop] - tables.expert_parameters[start]
        ring = Ring.of(seats)
        dense = (tables.parameters(start, stop) - experts) / ring.least_tp
        once = [ring.seconds(dense * size, tables) / 2 for size in (sizes.weight, sizes.gradient)]
        if experts:
            tile, of_experts = stage.expert_parallel * stage.expert_tensor, Ring.of_experts([stage])
            for i, size in enumerate((sizes.weight, sizes.gradient)):
                once[i] += of_experts.seconds(experts / tile * size, tables) / 2
        return cls(*once)


def with_zero(
    stage: Stage, traffic: ZeroTraffic, forward: Seconds, backward: Seconds
) -> tuple[Seconds, Seconds]:
    """Forward and backward with what ZeRO sends during them.

    A block's collectives run beside the next block's computing, so that those of one block show.
    """
    blocks = len(stage.blocks)
    gather = traffic.gather_s if stage.zero >= 3 else 0.0
    scatter = traffic.scatter_s if stage.zero >= 2 else 0.0
    return _beside(forward, gather, blocks), _beside(backward, gather + scatter, blocks)


def _beside(compute: Seconds, traffic: Seconds, blocks: int) -> Seconds:
    return max(compute, traffic) + traffic / blocks
