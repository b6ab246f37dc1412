"""Sailor (SOSP 2025, arXiv 2504.17096): depth and micro-batch, TP by memory and speed-up, types by stage.

From the paper's description and the outline of its planner. For every depth and micro-batch the layers are
dealt evenly; the TP degree of a type in a stage is the least whose memory fits, and for all but the fastest
type doubled while that is at least 1.5 times as fast (its heuristics H1 and H2); the number of copies starts
at the most and falls until the time does not (H3); a dynamic program over stages and the devices that are
left chooses the types of every stage, several in one where that pays, by the time of the slowest stage and
the sum of all. What differs: stages that fit only so recompute; a third choice of degrees prefers
recomputation to TP; the program looks at mixtures that use up a type before the next, and at all of them only
where they are few; micro-batches are dealt to the copies one by one instead of rounded up; the price judges
the first of the ranking. Money and zones are left out; no expert parallelism, as published: experts are whole
on a device or divided by its TP group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise, permutations, product

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.shares import largest_remainder
from arachne_runtime.units import Seconds

from ..cost.memory import in_flight
from ..request import Request
from .lines import Line, Post, seated
from .rough_cuts import even_layers
from .shortlist import Shortlist
from .site import Site
from .strategy import DEFAULT_BUDGET_S, Clock

SPEED_UP = 1.5
"""A type's TP degree is doubled where that makes a stage at least so much faster (the published constant)."""

SLACK = 1.1
"""Programs whose bound is so many times the best found are not solved: messages come on top of both."""

CLOCK_EVERY = 64
"""States of a program between two looks at the clock: a look takes as long as a state."""

MOST_MIXTURES = 40
"""Mixtures of types in a stage: all where they are fewer, else those that use up a type before the next."""


class Degrees(StrEnum):
    """How TP degrees are chosen."""

    LEAST = "least"
    SPEED_UP = "speed-up"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Sailor:
    """A dynamic program over stages for every depth, micro-batch and number of copies."""

    name: str = "sailor"

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its first that fit; None where none does."""
        site = Site(request)
        shortlist = Shortlist(site, Clock(budget_s))
        sizes = sorted(
            {n for kind in site.types for tp in site.degrees_of(kind) for n in site.sizes(kind, tp)}
        )
        for depth in _depths(min(site.num_blocks, len(request.cluster.devices))):
            layers = even_layers(site.kinds, depth)
            if layers is None:
                continue
            bounds = (0, *(blocks.stop for blocks in layers))
            for size, degrees, kind in product(sizes, Degrees, site.schedules):
                _descend(shortlist, site, bounds, size, degrees, kind)
                if shortlist.closed:
                    return shortlist.best()
        return shortlist.best()


def _depths(most: int) -> list[int]:
    """Powers of two before all others, so that a short budget sees the whole range."""
    powers = [1 << k for k in range(most.bit_length())]
    return [*powers, *(n for n in range(1, most + 1) if n not in powers)]


def _descend(
    shortlist: Shortlist,
    site: Site,
    bounds: tuple[int, ...],
    size: int,
    degrees: Degrees,
    kind: ScheduleKind,
) -> None:
    """From the most copies down until the time does not fall any more."""
    total = site.request.global_batch // size
    if site.request.global_batch % size:
        return
    before = float("inf")
    for copies in _copies(total, len(site.request.cluster.devices) // (len(bounds) - 1)):
        count = -(-total // copies)
        ladder = _ladder(site, bounds, size, degrees, kind, count)
        if not all(ladder) or _bound(ladder, count) > SLACK * shortlist.least_s:
            continue
        program = _Program(site, bounds, ladder, copies, count, shortlist)
        seconds, mixtures = program.solve(0, program.all_devices())
        if mixtures is None:
            continue
        if seconds >= before or shortlist.closed:
            return
        before = seconds
        hops = 2 * (len(bounds) - 2) * site.hop_s(size)
        sync = max(site.sync_s(a, b, copies) for a, b in pairwise(bounds))
        for by_pipeline in (False, True):
            draw = partial(_draw, site, bounds, size, ladder, mixtures, copies, kind, by_pipeline)
            shortlist.add(seconds + hops + sync, draw)


def _bound(ladder: Sequence[dict[str, tuple[int, Seconds]]], count: int) -> Seconds:
    """Every stage on the type that is fastest at it."""
    fastest = [min(seconds for _, seconds in posts.values()) for posts in ladder]
    return (count - 1) * max(fastest) + sum(fastest)


def _copies(total: int, most: int) -> list[int]:
    """Numbers of copies that change the micro-batches of the busiest, most first."""
    found = {-(-total // -(-total // copies)) for copies in range(1, min(most, total) + 1)}
    return sorted(found, reverse=True)


def _ladder(
    site: Site, bounds: Sequence[int], size: int, degrees: Degrees, kind: ScheduleKind, count: int
) -> list[dict[str, tuple[int, Seconds]]]:
    """By stage and type: TP degree and seconds of a micro-batch; types that do not fit are left out."""
    depth = len(bounds) - 1
    stages = []
    for s, (start, stop) in enumerate(pairwise(bounds)):
        held = in_flight(kind, s, depth, count)
        found = {}
        for device in site.types:
            post = _degree(site, device, start, stop, size, held, degrees, device != site.types[0])
            if post is not None:
                found[device] = post
        stages.append(found)
    return stages


def _degree(
    site: Site, device: str, start: int, stop: int, size: int, held: int, degrees: Degrees, may_grow: bool
) -> tuple[int, Seconds] | None:
    fitting: list[tuple[int, Seconds]] = []
    for tp in site.degrees_of(device):
        for again in (False, True):
            prefix = site.prefix(device, tp, size, again)
            if prefix is not None and site.reach(device, tp, size, held, again)[start] >= stop:
                if not again or degrees is Degrees.RECOMPUTE or tp == site.degrees_of(device)[-1]:
                    fitting.append((tp, prefix[stop] - prefix[start]))
                break
    if not fitting:
        return None
    best = fitting[0]
    if degrees is Degrees.SPEED_UP and may_grow:
        for tp, seconds in fitting[1:]:
            if best[1] / seconds < SPEED_UP:
                break
            best = tp, seconds
    return best


_Counts = tuple[int, ...]
"""One number for each device type, fastest first."""


@dataclass(slots=True)
class _Program:
    """Types for every stage: least (M - 1) times the slowest plus the sum, stage by stage from the front."""

    site: Site
    bounds: tuple[int, ...]
    ladder: list[dict[str, tuple[int, Seconds]]]
    copies: int
    count: int
    shortlist: Shortlist
    _needs: list[list[int]] = field(default_factory=list)
    _known: dict[tuple[int, _Counts], tuple[Seconds, Seconds, tuple[_Counts, ...] | None]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Devices of each type that a stage and all behind it can take."""
        needs = [[0] * len(self.site.types)]
        for posts in reversed(self.ladder):
            degrees = [posts[kind][0] if kind in posts else 0 for kind in self.site.types]
            needs.append([n + self.copies * tp for n, tp in zip(needs[-1], degrees, strict=True)])
        self._needs = needs[::-1]

    def all_devices(self) -> _Counts:
        """Devices there are, by type."""
        entries = self.site.request.cluster.node
        return tuple(sum(e.count * e.gpus for e in entries if e.device == kind) for kind in self.site.types)

    def solve(self, stage: int, left: _Counts) -> tuple[Seconds, tuple[_Counts, ...] | None]:
        """Closed form and the replicas of each type by stage, or None where the devices do not suffice."""
        slowest, total, mixtures = self._best(stage, left)
        return (self.count - 1) * slowest + total, mixtures

    def _best(self, stage: int, left: _Counts) -> tuple[Seconds, Seconds, tuple[_Counts, ...] | None]:
        if stage == len(self.ladder):
            return 0.0, 0.0, ()
        key = stage, self._enough(stage, left)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._search(*key)
        return found

    def _enough(self, stage: int, left: _Counts) -> _Counts:
        """More devices of a type than all stages behind can take are as good as that many."""
        return tuple(map(min, left, self._needs[stage]))

    def _search(self, stage: int, left: _Counts) -> tuple[Seconds, Seconds, tuple[_Counts, ...] | None]:
        best: tuple[Seconds, Seconds, tuple[_Counts, ...] | None] = (float("inf"), float("inf"), None)
        best_s = float("inf")
        posts = self.ladder[stage]
        degrees = [posts[kind][0] if kind in posts else 0 for kind in self.site.types]
        seconds = [posts[kind][1] if kind in posts else 0.0 for kind in self.site.types]
        room = [n // tp if tp else 0 for n, tp in zip(left, degrees, strict=True)]
        if len(self._known) % CLOCK_EVERY == 0 and self.shortlist.closed:
            return best
        for mixture in mixtures_of(room, self.copies):
            here = max(s for s, n in zip(seconds, mixture, strict=True) if n)
            rest = tuple(n - m * tp for n, m, tp in zip(left, mixture, degrees, strict=True))
            slowest, total, behind = self._best(stage + 1, rest)
            if behind is None:
                continue
            value = (self.count - 1) * max(here, slowest) + here + total
            if value < best_s:
                best_s, best = value, (max(here, slowest), here + total, (mixture, *behind))
        return best


def mixtures_of(room: Sequence[int], copies: int) -> Iterator[_Counts]:
    """How many replicas of each type make up ``copies``, within ``room``."""
    few = 1
    for n in room[:-1]:
        few *= min(n, copies) + 1
    if few <= MOST_MIXTURES:
        for front in product(*(range(min(n, copies), -1, -1) for n in room[:-1])):
            last = copies - sum(front)
            if 0 <= last <= room[-1]:
                yield (*front, last)
        return
    seen = set()
    for order in permutations(range(len(room))):
        left, mixture = copies, [0] * len(room)
        for kind in order:
            mixture[kind] = min(room[kind], left)
            left -= mixture[kind]
        if left == 0 and tuple(mixture) not in seen:
            seen.add(tuple(mixture))
            yield tuple(mixture)


def _draw(
    site: Site,
    bounds: tuple[int, ...],
    size: int,
    ladder: Sequence[dict[str, tuple[int, Seconds]]],
    mixtures: Sequence[_Counts],
    copies: int,
    kind: ScheduleKind,
    by_pipeline: bool,
) -> Plan | None:
    """Slow replicas of all stages gather in the same pipelines."""
    columns: list[list[Post]] = []
    for posts, mixture in zip(ladder, mixtures, strict=True):
        counted = zip(site.types, mixture, strict=True)
        columns.append([(device, posts[device][0]) for device, n in counted for _ in range(n)])
    counts = largest_remainder(site.request.global_batch // size, [1] * copies)
    lines = [Line(tuple(column[d] for column in columns), bounds, size, counts[d]) for d in range(copies)]
    return seated(site, lines, kind, by_pipeline)
