"""Metis (USENIX ATC 2024): orders of types, sizes of stages, (copies, TP) and uneven data within each stage.

From the paper's description and the outline of its search. Devices stand type by type in every order of the
types; for every number of stages they are divided into stages of powers of two, none smaller than half its
even part, and alike sizes move together in at most four bundles when they are permuted; for every number of
micro-batches each stage starts with copies only, and TP is doubled in the stage that lacks most memory until
all fit. Copies of a stage that are unlike take samples by their speed. Layers are divided once, in proportion
to the stages' speeds, within what memory admits. The cost is (M - 1) times the slowest stage plus all stages,
messages and the slowest reduction; its ranking is what the price judges here, as a shortlist of Metis re-
priced is much better than its first. What differs: the memory of a stage is the price's own; numbers of
stages take turns, so that a budget ends the search everywhere alike; a stage that fits only so recomputes; TP
groups that would cross nodes are not formed, and where the devices are no sum of powers of two that the
limits allow, the slowest few stay idle. No expert parallelism, as published: experts are whole on a device or
divided by its TP group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice, pairwise, permutations

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.shares import largest_remainder, water_fill_table
from arachne_runtime.units import Seconds

from ..cost.memory import in_flight
from ..request import Request
from .rough_cuts import in_proportion
from .shortlist import Shortlist
from .site import Seat, Site, types_of
from .sketch import PipelineSketch, StageSketch, drawn
from .strategy import DEFAULT_BUDGET_S, Clock

LEAST_PART = 0.5
"""Of its even part of the devices, what a stage has at least (the published code's variance)."""

MOST_BUNDLES = 4
"""Bundles of stages that are permuted (the published code's longest permutation)."""

MOST_GROUPINGS = 60
"""Divisions of the devices looked at for one number of stages and one order of types."""

LEAST_USED = 0.8
"""Of the devices, how many a division has to use where no sum of powers of two uses all."""

HOPELESS = 1.5
"""Numbers of micro-batches whose bubbles alone cost so many times the best found are skipped."""


@dataclass(frozen=True, slots=True)
class Metis:
    """One pipeline of unlike stages."""

    name: str = "metis"

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The fastest of its first that fit; None where none does."""
        site = Site(request)
        shortlist = Shortlist(site, Clock(budget_s))
        if site.pace_s(site.types[0]) == float("inf"):
            return shortlist.best()  # no share that is allowed was measured
        searches = [_Search(site, shortlist, kind) for kind in site.schedules]
        for devices, sizes in _groupings(site):
            for search in searches:
                search.visit(devices, sizes)
            if shortlist.closed:
                break
        return shortlist.best()


# --- between stages: which devices


def _groupings(site: Site) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Devices in order and the sizes of stages; numbers of stages and orders of types take turns."""
    num_devices = len(site.request.cluster.devices)
    turns = [
        _groupings_of(_in_order(site, order), depth)
        for depth in range(1, min(num_devices, site.num_blocks) + 1)
        for order in permutations(site.types)
    ]
    while turns:
        left = []
        for turn in turns:
            found = next(turn, None)
            if found is not None:
                left.append(turn)
                yield found
        turns = left


def _in_order(site: Site, order: Sequence[str]) -> list[str]:
    nodes = site.request.cluster.nodes
    return [d for kind in order for node in nodes if node.entry.device == kind for d in node.devices]


def _groupings_of(devices: list[str], depth: int) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    for used in range(len(devices), int(LEAST_USED * len(devices)), -1):
        found = list(islice(sums(depth, used), 10 * MOST_GROUPINGS))
        if found:
            found.sort(key=lambda sizes: sizes[-1] - sizes[0])
            ordered = chain.from_iterable(orders(sizes) for sizes in found)
            for sizes in islice(ordered, MOST_GROUPINGS):
                yield devices[:used], sizes
            return


def sums(depth: int, total: int) -> Iterator[tuple[int, ...]]:
    """Ascending powers of two that add up, none below half the even part."""
    least = max(1, LEAST_PART * (total // depth))
    powers = [1 << k for k in range(total.bit_length()) if 1 << k >= least]

    def grow(sizes: tuple[int, ...], left: int, at: int) -> Iterator[tuple[int, ...]]:
        behind = depth - len(sizes)
        if behind == 0:
            if left == 0:
                yield sizes
            return
        for k in range(at, len(powers)):
            if powers[k] * behind > left or powers[-1] * behind < left:
                return
            yield from grow((*sizes, powers[k]), left - powers[k], k)

    yield from grow((), total, 0)


def orders(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Permutations of at most a few bundles: alike sizes are bound in pairs until they are few."""
    bundles: list[tuple[int, ...]] = [(size,) for size in sizes]
    while len(bundles) > MOST_BUNDLES:
        bound: list[tuple[int, ...]] = []
        for size, alike in groupby(bundles, key=lambda bundle: bundle[0]):
            here = list(alike)
            pairs = [here[i : i + 2] for i in range(0, len(here), 2)]
            bound += [tuple(chain.from_iterable(pair)) for pair in pairs]
            assert all(x == size for bundle in here for x in bundle)
        if len(bound) == len(bundles):
            break
        bundles = bound
    seen = set()
    for order in islice(permutations(bundles), 720):
        found = tuple(chain.from_iterable(order))
        if found not in seen:
            seen.add(found)
            yield found


# --- within stages: copies, TP, data and layers


@dataclass(frozen=True, slots=True)
class _Stage:
    """Devices of a stage under one (copies, TP), and what each copy takes of a micro-batch."""

    seats: tuple[Seat, ...]
    hardware: tuple[tuple[str, int], ...]
    """The different (type, share) among its copies."""
    shares: tuple[int, ...]
    tp: int
    whole_s: Seconds
    """Of all blocks, on its slowest copy."""


class _Search:
    """Fills divisions of the devices for one schedule; what stages have in common is worked out once."""

    def __init__(self, site: Site, shortlist: Shortlist, kind: ScheduleKind) -> None:
        self.site = site
        self.shortlist = shortlist
        self.kind = kind
        self.best_s = float("inf")
        self.demand = self._demand()
        batch = site.request.global_batch
        divisors = [n for n in range(batch, 0, -1) if batch % n == 0]
        self.counts = [n for n in divisors if batch // n <= site.request.most_micro_batch]
        counted = [(site.pace_s(n.device), n.count * n.gpus) for n in site.request.cluster.node]
        self.ideal_s = batch / sum(gpus / pace for pace, gpus in counted)
        self._deals: dict[tuple[tuple[str, ...], int, int], tuple[tuple[int, ...], Seconds] | None] = {}
        self._stages: dict[tuple[tuple[str, ...], int, int], _Stage | None] = {}

    def _demand(self) -> list[float]:
        """Prefix sums of the blocks' seconds on the fastest type: only their proportions count."""
        kind = self.site.types[0]
        tp = self.site.degrees_of(kind)[0]
        found = self.site.prefix(kind, tp, self.site.sizes(kind, tp)[0])
        assert found is not None  # ``sizes`` are measured ones
        return found

    def visit(self, devices: Sequence[str], sizes: Sequence[int]) -> None:
        """Every number of micro-batches for one division of the devices."""
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        groups = [tuple(devices[a:b]) for a, b in pairwise(ends)]
        for count in self.counts:
            if (count - 1 + len(sizes)) / count * self.ideal_s > HOPELESS * self.best_s:
                continue
            if not self._climb(groups, count, again=False):
                self._climb(groups, count, again=True)
            if self.shortlist.closed:
                return

    def _climb(self, groups: Sequence[tuple[str, ...]], count: int, *, again: bool) -> bool:
        """Copies only at first, then TP doubled where memory lacks most, until all stages fit."""
        micro_batch = self.site.request.global_batch // count
        degrees = [1] * len(groups)
        while True:
            stages = [self._stage(g, tp, micro_batch) for g, tp in zip(groups, degrees, strict=True)]
            lacking = [
                (len(g) // tp, s)
                for s, (g, tp) in enumerate(zip(groups, degrees, strict=True))
                if stages[s] is None
            ]
            if not lacking:
                known = [stage for stage in stages if stage is not None]
                bounds, lacking = self._balance(known, count, again)
                if bounds is not None:
                    self._offer(known, bounds, count, again)
                    return True
            for _, s in sorted(lacking, key=lambda pair: (-pair[0], pair[1])):
                if self._may_double(groups[s], degrees[s]):
                    degrees[s] *= 2
                    break
            else:
                return False

    def _may_double(self, group: tuple[str, ...], tp: int) -> bool:
        kinds = dict.fromkeys(types_of(self.site.request, [(d,) for d in group]))
        return len(group) >= 2 * tp and all(2 * tp in self.site.degrees_of(kind) for kind in kinds)

    def _stage(self, group: tuple[str, ...], tp: int, micro_batch: int) -> _Stage | None:
        """None where there are more copies than samples, or where a share was not measured."""
        key = group, tp, micro_batch
        if key not in self._stages:
            self._stages[key] = self._make_stage(*key)
        return self._stages[key]

    def _make_stage(self, group: tuple[str, ...], tp: int, micro_batch: int) -> _Stage | None:
        seats = []
        for _, devices in groupby(group, key=node_of):
            here = tuple(devices)
            seats += [here[i : i + tp] for i in range(0, len(here) - tp + 1, tp)]
        if not 0 < len(seats) <= micro_batch:
            return None
        types = types_of(self.site.request, seats)
        dealt = self._deal(types, tp, micro_batch)
        if dealt is None:
            return None
        shares, whole = dealt
        hardware = tuple(dict.fromkeys(zip(types, shares, strict=True)))
        return _Stage(tuple(seats), hardware, shares, tp, whole)

    def _deal(
        self, types: tuple[str, ...], tp: int, micro_batch: int
    ) -> tuple[tuple[int, ...], Seconds] | None:
        """Samples by copy, even among alike ones, by speed among unlike ones; the slowest copy's seconds."""
        key = types, tp, micro_batch
        if key not in self._deals:
            self._deals[key] = self._make_deal(*key)
        return self._deals[key]

    def _make_deal(
        self, types: tuple[str, ...], tp: int, micro_batch: int
    ) -> tuple[tuple[int, ...], Seconds] | None:
        ranges = {kind: self.site.request.tables.samples_range(kind, tp) for kind in types}
        known = [ranges[kind] for kind in types]
        least = [r[0] for r in known if r]
        caps = [min(r[1], micro_batch) for r in known if r]
        if len(least) < len(types) or not sum(least) <= micro_batch <= sum(caps):
            return None
        if len(set(types)) == 1:
            shares = largest_remainder(micro_batch, [1] * len(types))
        else:
            shares = water_fill_table(
                micro_batch, lambda r, n: self.site.whole_s(types[r], tp, n), least, caps
            )
        return shares, max(self.site.whole_s(kind, tp, n) for kind, n in zip(types, shares, strict=True))

    def _balance(
        self, stages: Sequence[_Stage], count: int, again: bool
    ) -> tuple[tuple[int, ...] | None, list[tuple[int, int]]]:
        """Boundaries in proportion to the stages' speeds, as far as memory admits any.

        Where it admits none: how many blocks too many each stage would have, in hundredths of its own.
        """
        reaches = [self._reach(stage, s, len(stages), count, again) for s, stage in enumerate(stages)]
        weights = [1 / stage.whole_s for stage in stages]
        bounds = in_proportion(self.demand, weights, reaches)
        if bounds is not None:
            return bounds, []
        free = [[self.site.num_blocks] * self.site.num_blocks] * len(stages)
        wished = in_proportion(self.demand, weights, free)
        assert wished is not None
        over = [
            (100 * (stop - reach[start]) // (stop - start), s)
            for s, (reach, (start, stop)) in enumerate(zip(reaches, pairwise(wished), strict=True))
        ]
        return None, [(lack, s) for lack, s in over if lack > 0] or over

    def _reach(self, stage: _Stage, s: int, depth: int, count: int, again: bool) -> list[int]:
        held = in_flight(self.kind, s, depth, count)
        found = [self.site.reach(kind, stage.tp, n, held, again) for kind, n in stage.hardware]
        return found[0] if len(found) == 1 else [min(ends) for ends in zip(*found, strict=True)]

    def _offer(self, stages: Sequence[_Stage], bounds: tuple[int, ...], count: int, again: bool) -> None:
        site, times, sync = self.site, [], 0.0
        for stage, (start, stop) in zip(stages, pairwise(bounds), strict=True):
            prefixes = [site.prefix(kind, stage.tp, n, again) for kind, n in stage.hardware]
            times.append(max(p[stop] - p[start] for p in prefixes if p is not None))
            sync = max(sync, site.sync_s(start, stop, len(stage.seats)))
        hops = 2 * sum(site.hop_s(max(stage.shares)) for stage in stages[1:])
        seconds = (count - 1) * max(times) + sum(times) + hops + sync
        self.best_s = min(self.best_s, seconds)
        family = len(stages), tuple(stage.tp for stage in stages), count
        self.shortlist.add(seconds, partial(_draw, site, stages, bounds, count, self.kind), family)


def _draw(
    site: Site, stages: Sequence[_Stage], bounds: tuple[int, ...], count: int, kind: ScheduleKind
) -> Plan | None:
    sketches = tuple(
        StageSketch(a, b, stage.seats, stage.shares)
        for stage, (a, b) in zip(stages, pairwise(bounds), strict=True)
    )
    return drawn(site, [PipelineSketch(count, sketches)], kind)
