"""The uniform grid of Megatron-LM: one TP degree, equal stages, equal copies, even layers; best of the grid.

From the rules of the grid (arXiv 2104.04473, sections 2 and 5.4), not from its code; the interleaved schedule
of that paper is left out. What differs, always in favour of the grid: layers need not divide by the number of
stages (the first stages take one more); groups that no grid uses stay idle, and so may the slower device
types altogether, as people do who train on their newest GPUs alone; both orders of ranks are tried (copies of
a stage side by side, as Megatron places them, or stages of a pipeline); stages that fit only so recompute
their activations. Experts are spread over the copies of a stage by every power of two (Megatron-Core). Points
of the grid are ranked by a closed form, the price judges the first of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..request import Request
from .copies import Grid, copies_plan, copies_seconds, shapes, spread_plan
from .rough_cuts import even_layers
from .shortlist import Shortlist
from .site import Site
from .strategy import DEFAULT_BUDGET_S, Clock


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every (TP, stages, copies, micro-batch), the most promising priced."""

    name: str = "uniform"
    depth: int | None = None
    """Stages of every pipeline; None: every depth."""

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its grid; None where nothing fits or no grid divides the batch."""
        site = Site(request)
        shortlist = Shortlist(site, Clock(budget_s))
        for tp in site.degrees:
            for count in range(len(site.types), 0, -1):
                types = site.types[:count]
                if not all(tp in site.degrees_of(kind) for kind in types):
                    continue
                in_file = [n.device for n in request.cluster.node if n.device in types]
                groups = site.groups(tp, dict.fromkeys(in_file))
                for grid, bounds in self._grids(site, groups):
                    _add(shortlist, site, grid, bounds, tp)
                    if shortlist.closed:
                        return shortlist.best()
        return shortlist.best()

    def _grids(
        self, site: Site, groups: Sequence[tuple[str, tuple[str, ...]]]
    ) -> Iterator[tuple[Grid, list[int]]]:
        depths = range(1, len(groups) + 1) if self.depth is None else [self.depth]
        for depth, copies in shapes(site, len(groups), depths):
            layers = even_layers(site.kinds, depth)
            if layers is None:
                break
            bounds = [0, *(blocks.stop for blocks in layers)]
            for by_pipeline in (False, True) if depth > 1 and copies > 1 else (False,):
                yield Grid(groups, depth, copies, by_pipeline), bounds


def _tiles(site: Site, grid: Grid, tp: int) -> list[tuple[int, int]]:
    """(EP, ETP) over the copies of a stage, whose pipelines then run in step; ETP is 1 or the TP degree."""
    found = [
        (1 << exponent, tensor)
        for exponent in range(1, site.num_experts.bit_length())
        for tensor in dict.fromkeys((1, tp))
        if site.num_experts % (1 << exponent) == 0 and grid.copies * tp % (tensor << exponent) == 0
    ]
    return sorted(found, key=lambda tile: tile[0] * tile[1])


def _add(shortlist: Shortlist, site: Site, grid: Grid, bounds: Sequence[int], tp: int) -> None:
    """Every micro-batch that divides; each of the schedules."""
    batch = site.request.global_batch
    for size in range(1, min(site.request.most_micro_batch, batch // grid.copies) + 1):
        if batch % (grid.copies * size):
            continue
        seconds = copies_seconds(site, grid, bounds, tp, size, batch // (grid.copies * size))
        if seconds is not None:
            for kind in site.schedules:
                shortlist.add(seconds, partial(copies_plan, site, grid, bounds, size, kind))
                tiles = _tiles(site, grid, tp) if grid.copies * size <= site.request.most_micro_batch else []
                if tiles:
                    shortlist.add(seconds, partial(spread_plan, site, grid, bounds, size, kind, tiles))
