"""HexiScale, also FlashFlex (arXiv 2409.01143): unlike pipelines by graph partition, TP and PP inside each.

From the paper's description and the outline of its scheduler. First the graph of devices is partitioned into
pipelines of about equal compute, by bandwidth; then each pipeline into stages whose devices share a node and
work tensor-parallel, or are split into stages of fewer; stages stand in an order of good links; layers go to
stages by their compute as far as memory allows, and micro-batches to pipelines by their speed. A local search
moves and swaps stages between pipelines while the time falls. What differs: vertices are nodes' tensor-
parallel groups, and nodes stand in a path of best links first, so a partition is a division of that path
(neighbours together, neighbours apart, or each type by itself) instead of a call of METIS; the TP degree of
each type is tried, not picked group by group; layers are cut exactly instead of by memory shares; all
pipelines have one micro-batch size; the price judges the first of the ranking. No expert parallelism, as
published: experts are whole on a device or divided by its TP group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise, product

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.shares import water_fill_table
from arachne_runtime.units import Seconds

from ..cuts import Cut
from ..request import Request
from .lines import Post, cut_line
from .shortlist import Shortlist
from .site import Seat, Site
from .sketch import PipelineSketch, StageSketch, drawn
from .strategy import DEFAULT_BUDGET_S, Clock

SLACK = 1.25
"""Partitions whose bound is so many times the best found are left: the bound is off by about as much."""

MOST_REFINED = 4
"""Of these, how many a local search starts from."""

MOST_SWAPS = 60
"""Moves and swaps that a local search tries in vain before it ends."""


class Division(StrEnum):
    """How the path of groups is divided into pipelines."""

    TOGETHER = "together"
    """Neighbours in one pipeline: messages between stages are fast."""
    APART = "apart"
    """Neighbours in different pipelines: reductions are fast."""
    BY_TYPE = "by type"
    """Pipelines of one type as far as they divide so."""


Vertex = tuple[str, Seat]
"""Device type and devices of a tensor-parallel group."""


@dataclass(frozen=True, slots=True)
class Partition:
    """What decides the groups of each pipeline, with a bound of the iteration."""

    bound_s: Seconds
    serial: int
    """Of equal bounds the first comes first."""
    degrees: tuple[int, ...]
    """TP by type, fastest first."""
    size: int
    """Samples of a micro-batch."""
    num_pipelines: int
    division: Division


@dataclass(frozen=True, slots=True)
class HexiScale:
    """Partitions by bandwidth and compute, cut exactly, refined by moves and swaps."""

    name: str = "hexiscale"

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its first that fit; None where none does."""
        site = Site(request)
        shortlist = Shortlist(site, Clock(budget_s))
        for kind in site.schedules:
            Scheduler(site, shortlist, kind).run()
        return shortlist.best()


class Scheduler:
    """The two levels of partition and the local search for one schedule."""

    def __init__(self, site: Site, shortlist: Shortlist, kind: ScheduleKind) -> None:
        self.site = site
        self.shortlist = shortlist
        self.kind = kind
        self.path = _path(site)
        self._cuts: dict[tuple[tuple[Post, ...], int, int], Cut | None] = {}

    def run(self) -> None:
        """Partitions best bound first, then the local search from the best of them."""
        found: list[tuple[Seconds, int, list[list[Vertex]], int]] = []
        ranked = sorted(self._partitions(), key=lambda p: (p.bound_s, p.serial))
        best_s = float("inf")
        for partition in ranked:
            if self.shortlist.half_closed or partition.bound_s > SLACK * best_s:
                break
            for front in (False, True):
                pipelines = self.divide(partition, front)
                seconds = self._offer(pipelines, partition.size)
                best_s = min(best_s, seconds)
                if seconds < float("inf"):
                    found.append((seconds, len(found), pipelines, partition.size))
        for seconds, _, pipelines, size in sorted(found, key=lambda f: f[:2])[:MOST_REFINED]:
            self._refine(seconds, pipelines, size)

    def _partitions(self) -> Iterator[Partition]:
        """Every choice of TP degrees by type, micro-batch, number of pipelines and division."""
        site, serial = self.site, 0
        options = [site.degrees_of(kind) for kind in site.types]
        for degrees in product(*options):
            groups = [site.capacity(kind, tp) for kind, tp in zip(site.types, degrees, strict=True)]
            sizes = {n for kind, tp in zip(site.types, degrees, strict=True) for n in site.sizes(kind, tp)}
            for size in sorted(sizes):
                if site.request.global_batch % size:
                    continue
                for number in _numbers(min(sum(groups), site.request.global_batch // size)):
                    for division in Division if len(groups) > 1 else (Division.TOGETHER, Division.APART):
                        serial += 1
                        bound = self._bound(degrees, groups, size, number)
                        if bound < float("inf"):
                            yield Partition(bound, serial, degrees, size, number, division)
                if self.shortlist.half_closed:
                    return

    def _bound(self, degrees: Sequence[int], groups: Sequence[int], size: int, number: int) -> Seconds:
        """All pipelines alike and blocks divisible: every stage takes the same time."""
        site = self.site
        named = list(zip(site.types, degrees, groups, strict=True))
        if any(site.whole_s(kind, tp, size) == float("inf") for kind, tp, _ in named):
            return float("inf")
        speed = sum(n / site.whole_s(kind, tp, size) for kind, tp, n in named)
        room = sum(n * tp * site.room_bytes(kind) for kind, tp, n in named) / number
        state = site.request.model.bytes_per_parameter.total
        if room < state * site.request.tables.parameters(0, site.num_blocks):
            return float("inf")
        count = site.request.global_batch / size / number
        depth = min(sum(groups) / number, site.num_blocks)
        sync = site.sync_s(0, site.num_blocks, number) / depth
        return (count - 1 + depth) * number / speed + 2 * (depth - 1) * site.hop_s(size) + sync

    def divide(self, partition: Partition, front: bool) -> list[list[Vertex]]:
        """The path among pipelines; ``front``: types with the most memory for their compute come first."""
        site, number = self.site, partition.num_pipelines
        groups = self._groups(partition.degrees)
        pipelines: list[list[Vertex]] = [[] for _ in range(number)]
        if partition.division is Division.BY_TYPE:
            self._fill_evenly([v for kind in site.types for v in groups[kind]], pipelines, partition.size)
        else:
            for kind in site.types:
                for i, vertex in enumerate(groups[kind]):
                    apart = partition.division is Division.APART
                    pipelines[i % number if apart else i * number // len(groups[kind])].append(vertex)
        return [self._ordered(p, front) for p in pipelines]

    def _groups(self, degrees: Sequence[int]) -> dict[str, list[Vertex]]:
        found: dict[str, list[Vertex]] = {kind: [] for kind in self.site.types}
        chosen = dict(zip(self.site.types, degrees, strict=True))
        for kind, devices in self.path:
            tp = chosen[kind]
            found[kind] += [(kind, devices[i : i + tp]) for i in range(0, len(devices) - tp + 1, tp)]
        return found

    def _fill_evenly(self, vertices: Sequence[Vertex], pipelines: list[list[Vertex]], size: int) -> None:
        """One pipeline after the other, each to its part of all compute."""
        speeds = [1 / self.site.whole_s(kind, len(seat), size) for kind, seat in vertices]
        part, filled, at = sum(speeds) / len(pipelines), 0.0, 0
        for vertex, speed in zip(vertices, speeds, strict=True):
            pipelines[min(at, len(pipelines) - 1)].append(vertex)
            filled += speed
            while filled >= part * (at + 1) * (1 - 1e-9):
                at += 1

    def _ordered(self, pipeline: Sequence[Vertex], front: bool) -> list[Vertex]:
        site = self.site
        ratio = {kind: site.pace_s(kind) * site.room_bytes(kind) for kind in site.types}
        return sorted(pipeline, key=lambda v: -ratio[v[0]] if front else ratio[v[0]])

    def _cut(self, pipeline: Sequence[Vertex], size: int, count: int) -> Cut | None:
        posts = tuple((kind, len(seat)) for kind, seat in pipeline)
        key = posts, size, min(count, len(posts))  # more micro-batches than stages change no memory
        if key not in self._cuts:
            held = count if self.kind is ScheduleKind.GPIPE else max(count, len(posts))
            self._cuts[key] = cut_line(self.site, posts, size, held, self.kind) if posts else None
        return self._cuts[key]

    def _cuts_of(self, pipelines: Sequence[Sequence[Vertex]], size: int) -> list[Cut] | None:
        count = -(-self.site.request.global_batch // size // len(pipelines))
        cuts = [self._cut(pipeline, size, count) for pipeline in pipelines]
        return None if None in cuts else [cut for cut in cuts if cut is not None]

    def _offer(self, pipelines: Sequence[Sequence[Vertex]], size: int) -> Seconds:
        """Its seconds, and a place on the shortlist; ``inf`` where a pipeline does not fit."""
        cuts = self._cuts_of(pipelines, size)
        if cuts is None:
            return float("inf")
        counts = self._counts(cuts, size)
        hops = 2 * max(len(cut.bounds) - 2 for cut in cuts) * self.site.hop_s(size)
        stages = dict.fromkeys(run for cut in cuts for run in pairwise(cut.bounds))
        sync = max(self.site.sync_s(start, stop, len(cuts)) for start, stop in stages)
        seconds = max(c.pipeline_s(n) for c, n in zip(cuts, counts, strict=True)) + hops + sync
        self.shortlist.add(
            seconds, partial(_draw, self.site, pipelines, cuts, counts, size, self.kind), (len(cuts), size)
        )
        return seconds

    def _counts(self, cuts: Sequence[Cut], size: int) -> tuple[int, ...]:
        """Micro-batches by pipeline that end first."""
        total = self.site.request.global_batch // size
        most = [total] * len(cuts)
        return water_fill_table(total, lambda p, n: cuts[p].pipeline_s(n), [1] * len(cuts), most)

    def _refine(self, seconds: Seconds, pipelines: list[list[Vertex]], size: int) -> None:
        """Moves of a group from the slowest pipeline to a faster one, and swaps of unlike groups."""
        vain = 0
        while vain < MOST_SWAPS and not self.shortlist.closed:
            better = None
            for changed in self._neighbours(pipelines, size):
                found = self._offer(changed, size)
                if found < seconds * (1 - 1e-9):
                    better, seconds = changed, found
                    break
                vain += 1
                if vain >= MOST_SWAPS or self.shortlist.closed:
                    return
            if better is None:
                return
            pipelines = better

    def _neighbours(self, pipelines: list[list[Vertex]], size: int) -> Iterator[list[list[Vertex]]]:
        """Changes between the pipelines with the slowest and the fastest stages, unlike ones only."""
        cuts = self._cuts_of(pipelines, size)
        assert cuts is not None
        order = sorted(range(len(cuts)), key=lambda p: cuts[p].slowest_s)
        seen: set[object] = set()
        for b, a in product(order[:4], order[:-5:-1]):
            if a == b:
                continue
            for i, x in enumerate(pipelines[a]):
                for j, y in enumerate([*pipelines[b], None]):
                    what = self._kinds(pipelines[a]), self._kinds(pipelines[b]), i, j
                    if what in seen or (y is not None and (y[0], len(y[1])) == (x[0], len(x[1]))):
                        continue
                    seen.add(what)
                    changed = [list(p) for p in pipelines]
                    changed[a][i : i + 1] = [y] if y is not None else []
                    changed[b][j : j + 1] = [x]
                    if changed[a]:
                        yield changed

    def _kinds(self, pipeline: Sequence[Vertex]) -> tuple[Post, ...]:
        return tuple((kind, len(seat)) for kind, seat in pipeline)


def _numbers(most: int) -> list[int]:
    """Numbers of pipelines: all to 16, then sixteen of each doubling."""
    return [n for n in range(1, most + 1) if n % (1 << max(0, n.bit_length() - 5)) == 0]


def _path(site: Site) -> list[Vertex]:
    """Nodes in a path of best links: always the nearest that is left, ties in the file's order."""
    fleet = site.request.fleet
    left = list(site.request.cluster.nodes)
    path = [left.pop(0)]
    uniform = not site.request.cluster.network.pair
    while left:
        here = path[-1]
        at = (
            0
            if uniform
            else min(range(len(left)), key=lambda i: fleet.link(here.name, left[i].name).seconds(2**20))
        )
        path.append(left.pop(at))
    return [(node.entry.device, node.devices) for node in path]


def _draw(
    site: Site,
    pipelines: Sequence[Sequence[Vertex]],
    cuts: Sequence[Cut],
    counts: Sequence[int],
    size: int,
    kind: ScheduleKind,
) -> Plan | None:
    sketches = [
        PipelineSketch(
            count,
            tuple(
                StageSketch(a, b, (seat,), (size,))
                for (_, seat), (a, b) in zip(pipeline, pairwise(cut.bounds), strict=True)
            ),
        )
        for pipeline, cut, count in zip(pipelines, cuts, counts, strict=True)
    ]
    return drawn(site, sketches, kind)
