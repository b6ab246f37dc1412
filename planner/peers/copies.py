"""Equal pipelines side by side over a list of tensor-parallel groups: what Megatron-LM runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from .site import Seat, Site
from .sketch import PipelineSketch, StageSketch, drawn


@dataclass(frozen=True, slots=True)
class Grid:
    """``depth`` stages times ``copies`` pipelines over the first of ``groups``."""

    groups: Sequence[tuple[str, Seat]]
    """Device type and devices."""
    depth: int
    copies: int
    by_pipeline: bool
    """Whether neighbours in the list are stages of one pipeline, else copies of one stage."""

    def at(self, stage: int, copy: int) -> tuple[str, Seat]:
        """The group of a stage of a pipeline."""
        return self.groups[copy * self.depth + stage if self.by_pipeline else stage * self.copies + copy]

    def types(self) -> NDArray[np.object_]:
        """Device types by copy and stage."""
        kinds = np.array([kind for kind, _ in self.groups[: self.depth * self.copies]], dtype=object)
        if self.by_pipeline:
            return kinds.reshape(self.copies, self.depth)
        return kinds.reshape(self.depth, self.copies).T

    def rows(self) -> list[tuple[str, ...]]:
        """The different pipelines, as types by stage."""
        return list(dict.fromkeys(tuple(row) for row in self.types().tolist()))


def shapes(site: Site, num_groups: int, depths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(stages, copies) that use the most groups, with copies that divide the global batch."""
    batch = site.request.global_batch
    divisors = [n for n in range(1, min(batch, num_groups) + 1) if batch % n == 0]
    for depth in depths:
        fitting = [n for n in divisors if n * depth <= num_groups]
        if fitting:
            yield depth, fitting[-1]


def copies_plan(site: Site, grid: Grid, bounds: Sequence[int], size: int, kind: ScheduleKind) -> Plan | None:
    """The plan with ``size`` samples a micro-batch of each pipeline; None where it does not fit."""
    count = site.request.global_batch // (grid.copies * size)
    pipelines = [
        PipelineSketch(
            count,
            tuple(
                StageSketch(bounds[s], bounds[s + 1], (grid.at(s, copy)[1],), (size,))
                for s in range(grid.depth)
            ),
        )
        for copy in range(grid.copies)
    ]
    return drawn(site, pipelines, kind)


def spread_plan(
    site: Site,
    grid: Grid,
    bounds: Sequence[int],
    size: int,
    kind: ScheduleKind,
    tiles: Sequence[tuple[int, int]],
) -> Plan | None:
    """The same with all copies in one pipeline, whose stages spread their experts over them.

    The first (EP, ETP) of ``tiles`` with which nothing recomputes, else the first that fits.
    """
    plans = (wide_plan(site, grid, bounds, size, kind, tile) for tile in tiles)
    fitting = [plan for plan in plans if plan is not None]
    plain = [p for p in fitting if not any(s.recompute for pipe in p.pipelines for s in pipe.stages)]
    return next(iter(plain or fitting), None)


def wide_plan(
    site: Site, grid: Grid, bounds: Sequence[int], size: int, kind: ScheduleKind, tile: tuple[int, int]
) -> Plan | None:
    """All copies in one pipeline of wide stages; ``tile``: (EP, ETP) over their devices."""
    stages = tuple(
        StageSketch(
            bounds[s],
            bounds[s + 1],
            tuple(grid.at(s, copy)[1] for copy in range(grid.copies)),
            (size,) * grid.copies,
            tile,
        )
        for s in range(grid.depth)
    )
    count = site.request.global_batch // (grid.copies * size)
    return drawn(site, [PipelineSketch(count, stages)], kind)


def copies_seconds(
    site: Site, grid: Grid, bounds: Sequence[int], tp: int, size: int, count: int
) -> Seconds | None:
    """A closed form of an iteration: the slowest pipeline, its messages and the reductions.

    None where a type was not measured for it.
    """
    rows = grid.rows()
    stages: dict[str, list[Seconds]] = {}
    for kind in dict.fromkeys(kind for row in rows for kind in row):
        prefix = site.prefix(kind, tp, size)
        if prefix is None:
            return None
        stages[kind] = [prefix[b] - prefix[a] for a, b in pairwise(bounds)]
    slowest = 0.0
    for row in rows:
        times = [stages[kind][s] for s, kind in enumerate(row)]
        slowest = max(slowest, (count - 1) * max(times) + sum(times))
    hops = 2 * (grid.depth - 1) * site.hop_s(size)
    rings = max(1, site.widest_node // tp) if grid.by_pipeline else 1
    sync = max(site.sync_s(a, b, grid.copies, rings) for a, b in pairwise(bounds))
    return slowest + hops + sync
