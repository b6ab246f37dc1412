"""The uniform grid of Megatron-LM: equal stages, equal widths, even layers, all devices; best of the grid.

From the rules of the grid (arXiv 2104.04473), not from its code. What differs: layers need not divide by the
number of stages (the first stages take one more), and tensor parallelism is left out, as in the first search.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.rows import consecutive
from arachne_runtime.plan.shares import largest_remainder
from arachne_runtime.units import Seconds

from ..request import Request
from .strategy import DEFAULT_BUDGET_S, Clock, best, most_micro_batch


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every (stages, micro-batch) whose product with the copies is the number of devices, priced."""

    name: str = "uniform"
    depth: int | None = None
    """Stages of every pipeline; None: every depth."""

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its grid; None where nothing fits or no grid divides devices and batch."""
        return best(
            request,
            Clock(budget_s),
            _plans(request, self.depth, recompute=False),
            _plans(request, self.depth, recompute=True),
        )


def propose(request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
    """``Uniform().propose``."""
    return Uniform().propose(request, budget_s=budget_s)


def even_layers(kinds: Sequence[str], num_stages: int) -> tuple[range, ...] | None:
    """Blocks by stage: the commonest kind dealt evenly, what is before it goes first, what is behind last.

    None where there are fewer layers than stages.
    """
    common, _ = Counter(kinds).most_common(1)[0]
    layers = [i for i, kind in enumerate(kinds) if kind == common]
    if len(layers) < num_stages:
        return None
    runs = consecutive(largest_remainder(len(layers), [1] * num_stages))
    starts = [0, *(layers[run.start] for run in runs[1:]), len(kinds)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def _plans(request: Request, only_depth: int | None, *, recompute: bool) -> Iterator[Plan]:
    """Megatron's order of ranks: stages outermost, so neighbours in the cluster file share a stage."""
    devices = request.cluster.devices
    for depth in range(1, len(devices) + 1) if only_depth is None else (only_depth,):
        layers = even_layers([block.kind for block in request.model.blocks], depth)
        if len(devices) % depth or layers is None:
            continue
        copies = len(devices) // depth
        columns = [devices[s * copies : (s + 1) * copies] for s in range(depth)]
        for size in range(1, min(most_micro_batch(request), request.global_batch // copies) + 1):
            if request.global_batch % (copies * size) == 0:
                yield from _grid_point(request, layers, columns, size, recompute)


def _grid_point(
    request: Request, layers: tuple[range, ...], columns: Sequence[Sequence[str]], size: int, recompute: bool
) -> Iterator[Plan]:
    """``size`` samples a micro-batch, as pipelines side by side: each copy runs at its own pace."""
    copies = len(columns[0])
    pipelines = tuple(
        Pipeline(
            micro_batches=request.global_batch // (copies * size),
            micro_batch=size,
            stages=tuple(
                Stage(
                    layers=(blocks.start, blocks.stop),
                    recompute=recompute,
                    replicas=(Replica(devices=(column[copy],), share=size),),
                )
                for blocks, column in zip(layers, columns, strict=True)
            ),
        )
        for copy in range(copies)
    )
    for schedule in request.schedules:
        yield Plan(
            model=request.model.name,
            global_batch=request.global_batch,
            sequence=request.model.sequence,
            schedule=schedule,
            pipelines=pipelines,
        )
