"""AMP (arXiv 2210.07297): one (TP, stages, copies, micro-batch) for all, layers cut by dynamic programming.

From the paper's description: every product of degrees and every micro-batch is visited; ranks are placed TP
innermost, then copies, then stages; a dynamic program cuts the layers for each number of stages; the cost is
(M - 1) times the slowest stage, plus all stages, plus messages, plus the slowest reduction; the best by that
cost are tried for real, which is what the price does here with the first that fit (AMP has no model of
memory). As in the paper devices differ by their links only: seconds of a layer are averaged over the types.
What differs: groups that no product uses stay idle; stages may recompute where memory asks for it; the cost
of messages and reductions is that of the general network. No expert parallelism, as in the paper: experts are
whole on a device or divided by its TP group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cuts import least_slowest_of_every_depth
from ..request import Request
from .copies import Grid, copies_plan, shapes
from .rough_cuts import runs_of
from .shortlist import Shortlist
from .site import Seat, Site
from .strategy import DEFAULT_BUDGET_S, Clock


@dataclass(frozen=True, slots=True)
class Amp:
    """Uniform degrees and a cut of least slowest stage, under averaged costs."""

    name: str = "amp"

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its first that fit; None where none does."""
        site = Site(request)
        shortlist = Shortlist(site, Clock(budget_s))
        for tp in site.degrees:
            types = list(dict.fromkeys(n.device for n in request.cluster.node))
            if all(tp in site.degrees_of(kind) for kind in types):
                _visit(shortlist, site, site.groups(tp, types), tp)
            if shortlist.closed:
                break
        return shortlist.best()


def _visit(shortlist: Shortlist, site: Site, groups: Sequence[tuple[str, Seat]], tp: int) -> None:
    """All stages, copies and micro-batches of one TP degree."""
    batch, depths = site.request.global_batch, range(1, min(len(groups), site.num_blocks) + 1)
    grids = [Grid(groups, depth, copies, False) for depth, copies in shapes(site, len(groups), depths)]
    for size in range(1, site.request.most_micro_batch + 1):
        here = [grid for grid in grids if batch % (grid.copies * size) == 0]
        prefix = _average(site, groups, tp, size) if here else None
        if prefix is None:
            continue
        cuts = least_slowest_of_every_depth(runs_of(prefix.tolist()), max(grid.depth for grid in here))
        for grid in here:
            bounds = cuts[grid.depth - 1]
            seconds = _cost(site, grid, prefix, bounds, size)
            for kind in site.schedules:
                shortlist.add(seconds, partial(copies_plan, site, grid, bounds, size, kind))
        if shortlist.closed:
            return


def _average(
    site: Site, groups: Sequence[tuple[str, Seat]], tp: int, size: int
) -> NDArray[np.float64] | None:
    """Prefix sums of seconds, averaged over groups; None where a type was not measured."""
    counts: dict[str, int] = {}
    for kind, _ in groups:
        counts[kind] = counts.get(kind, 0) + 1
    total = np.zeros(site.num_blocks + 1)
    for kind, count in counts.items():
        found = site.prefix(kind, tp, size)
        if found is None:
            return None
        total += count * np.asarray(found)
    return total / len(groups)


def _cost(site: Site, grid: Grid, prefix: NDArray[np.float64], bounds: Sequence[int], size: int) -> Seconds:
    count = site.request.global_batch // (grid.copies * size)
    times = np.diff(prefix[list(bounds)])
    sync = max(site.sync_s(a, b, grid.copies) for a, b in pairwise(bounds))
    hops = 2 * (grid.depth - 1) * site.hop_s(size)
    return float((count - 1) * times.max() + times.sum()) + hops + sync
