"""Pipelines as lines of (device type, TP) by stage: their exact cut, their seconds, and their devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from ..cost.memory import in_flight
from ..cuts import Cut, cut_at, least_slowest
from .rough_cuts import within
from .site import Seat, Site, Supply
from .sketch import PipelineSketch, StageSketch, drawn

Post = tuple[str, int]
"""Device type and TP degree of a stage."""


@dataclass(frozen=True, slots=True)
class Line:
    """One pipeline before it has devices: one replica a stage."""

    posts: tuple[Post, ...]
    bounds: tuple[int, ...]
    """Boundaries 0..L of its stages."""
    size: int
    """Samples of a micro-batch."""
    micro_batches: int


def cut_line(
    site: Site, posts: Sequence[Post], size: int, micro_batches: int, kind: ScheduleKind
) -> Cut | None:
    """The least slowest stage under memory, without recomputation or with it in all stages.

    None where neither fits or a post was not measured.
    """
    found = [
        cut
        for again in (False, True)
        if (cut := _cut(site, posts, size, micro_batches, kind, again)) is not None
    ]
    return min(found, key=lambda cut: cut.pipeline_s(micro_batches), default=None)


def _cut(
    site: Site, posts: Sequence[Post], size: int, micro_batches: int, kind: ScheduleKind, again: bool
) -> Cut | None:
    depth = len(posts)
    if depth > site.num_blocks:
        return None
    stages = []
    for s, (device, tp) in enumerate(posts):
        runs = site.runs(device, tp, size, again)
        if runs is None:
            return None
        reach = site.reach(device, tp, size, in_flight(kind, s, depth, micro_batches), again)
        stages.append(runs if min(reach) == site.num_blocks else within(runs, reach))
    bounds = least_slowest(stages)
    return None if bounds is None else cut_at(stages, bounds)


def line_seconds(site: Site, cut: Cut, micro_batches: int, copies: int, size: int) -> Seconds:
    """The cut's closed form with its messages and the reduction of its largest stage over ``copies``."""
    hops = 2 * (len(cut.bounds) - 2) * site.hop_s(size)
    sync = max(site.sync_s(a, b, copies) for a, b in pairwise(cut.bounds))
    return cut.pipeline_s(micro_batches) + hops + sync


def seated(site: Site, lines: Sequence[Line], kind: ScheduleKind, by_pipeline: bool) -> Plan | None:
    """The lines on devices, copies of a stage close or stages of a pipeline; None where they do not fit."""
    places = [(p, s) for p, line in enumerate(lines) for s in range(len(line.posts))]
    places.sort(key=lambda at: (-lines[at[0]].posts[at[1]][1], at if by_pipeline else at[::-1]))
    supply = Supply(site.request)
    seats: dict[tuple[int, int], Seat] = {}
    for p, s in places:
        seat = supply.take(*lines[p].posts[s])
        if seat is None:
            return None
        seats[p, s] = seat
    sketches = [
        PipelineSketch(
            line.micro_batches,
            tuple(
                StageSketch(a, b, (seats[p, s],), (line.size,))
                for s, (a, b) in enumerate(pairwise(line.bounds))
            ),
        )
        for p, line in enumerate(lines)
    ]
    return drawn(site, sketches, kind)
