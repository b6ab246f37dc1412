"""What runs say of the seconds between computing: the fixed cost of a step, and sums of gradients on links.

Messages between stages leave no trace of their own: a rank that waits for one also waits for the stage
before, and two ranks' clocks start apart. So links are judged by the sums of gradients.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from msgspec.structs import replace

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.profile import (
    LinkPoint,
    LinkScope,
    LinkTiming,
    Profile,
    Source,
    StepTiming,
)
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.units import Seconds

from ..cost.fleet import NodeFacts
from ..cost.seats import Seats, seats_of
from ..cost.sync import Address, commit_seconds, reductions_of
from ..cost.tables import Tables
from .factors import DRIFT, NORMAL_95
from .observe import FLOOR
from .run import Run, spent

LINK_PRIOR = 1.5
"""Deviation of the log of a link's factor before anything has run: sums of gradients in the demonstration's
lab took 4 to 8 times what its cluster file says (load 10 on 2 cores, 2026-11-30)."""
LINK_NOISE = 0.3
"""Deviation of the log of one run's sums on a link: what else goes over it, how well ranks meet. The same 7.6
MB over the demonstration's four devices took 24 and 46 ms in two runs (load 10 on 2 cores, 2026-11-30)."""
PROBE_BYTES = 2**20
"""Of a message that tells which of some links is the slowest."""
LATENCY_BYTES = 2**16
"""Messages up to this size are ruled by latency, of which sums of gradients say nothing."""
REST_PRIOR, REST_NOISE = 0.7, 0.3
"""Deviations of the log of a step's fixed cost before anything has run, and of one run's. The demonstration's
is 14 to 17 ms of 1.6 s (docs/measuring.md)."""


class StepFactor(Document, frozen=True, kw_only=True):
    """What a step costs a device type beside its blocks."""

    device: str
    before_s: Seconds
    after_s: Seconds


class LinkFactor(Document, frozen=True, kw_only=True):
    """What the seconds of messages between two device types are multiplied by."""

    between: tuple[str, str]
    scope: LinkScope
    factor: float
    low: float
    high: float
    runs: int
    applied: bool
    """Whether the runs say that it is slower; else it stays."""

    def __str__(self) -> str:
        a, b = self.between
        told = f"links {a} to {b} ({self.scope}): {self.factor:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return told if self.applied else f"{told}, not applied"


def step_factors(profile: Profile, runs: Sequence[tuple[Run, Tables]]) -> tuple[StepFactor, ...]:
    """The fixed cost of a step on each device type that ran, from what is left of measured steps.

    In logs: shrunk towards the profile's by the deviations above; where it has none, what was measured.
    """
    found: dict[str, list[Seconds]] = defaultdict(list)
    for run, tables in runs:
        seats = seats_of(run.plan, tables)
        names = {seat.node.device.name for pipeline in seats for stage in pipeline for seat in stage}
        slowest_s = max(map(profile.step, names))
        if run.rest_s is None:
            continue
        left_s = run.rest_s - (commit_seconds(seats, tables) - slowest_s) - profile.step_s
        if left_s <= 0:
            continue
        for name in names:  # the price takes the slowest type's: the others keep their proportion to it
            found[name].append(left_s * profile.step(name) / slowest_s if slowest_s > 0 else left_s)
    return tuple(
        StepFactor(device=name, before_s=profile.step(name), after_s=_shrunk(profile.step(name), seconds))
        for name, seconds in sorted(found.items())
    )


def _shrunk(before_s: Seconds, measured_s: Sequence[Seconds]) -> Seconds:
    middle = statistics.median(measured_s)
    if before_s <= 0:
        return middle
    part: float = REST_PRIOR**2 / (REST_PRIOR**2 + REST_NOISE**2 / len(measured_s))
    return float(before_s * (middle / before_s) ** part)


@dataclass(frozen=True, slots=True, order=True)
class _Way:
    between: tuple[str, str]
    scope: LinkScope


def link_factors(runs: Sequence[tuple[Run, Tables]]) -> tuple[LinkFactor, ...]:
    """Factors of the links that set the pace of sums of gradients.

    A sum that took less than its price may have run beside the last backward, so only slower links are
    evidence: a factor whose interval reaches below 1 is told and not applied.
    """
    found: dict[_Way, list[float]] = defaultdict(list)
    for run, tables in runs:
        seats = seats_of(run.plan, tables)
        measured = _sums_of(run)
        told: dict[tuple[_Way, ...], list[tuple[Seconds, Seconds]]] = defaultdict(list)
        for reduction in reductions_of(run.plan, seats, tables):
            if measured.get(reduction.name, 0.0) > 0 and reduction.seconds > 0:
                both = measured[reduction.name], reduction.seconds
                told[_slowest(reduction.members, seats, tables)].append(both)
        for ways, pairs in told.items():
            log = math.log(math.fsum(m for m, _ in pairs) / math.fsum(p for _, p in pairs))
            for way in ways:
                found[way].append(log)
    return tuple(_link_factor(way, logs) for way, logs in sorted(found.items()))


def _link_factor(way: _Way, logs: Sequence[float]) -> LinkFactor:
    known, prior = len(logs) / LINK_NOISE**2, LINK_PRIOR**-2
    log = statistics.median(logs) * known / (known + prior)
    deviation = math.sqrt(1 / (known + prior) + FLOOR**2 + DRIFT**2)
    low = math.exp(log - NORMAL_95 * deviation)
    return LinkFactor(
        between=way.between,
        scope=way.scope,
        factor=math.exp(log),
        low=low,
        high=math.exp(log + NORMAL_95 * deviation),
        runs=len(logs),
        applied=low > 1,
    )


def _sums_of(run: Run) -> dict[str, Seconds]:
    """Seconds of each sum of gradients: of each step the least of its ranks, as the last does not wait."""
    least: dict[str, dict[int, Seconds]] = defaultdict(dict)
    for record in run.counted:
        if record.kind is RecordKind.REDUCE:
            of_step = least[record.name]
            of_step[record.step] = min(of_step.get(record.step, math.inf), spent(record))
    return {name: statistics.median(of_step.values()) for name, of_step in least.items()}


def _slowest(members: Sequence[Address], seats: Seats, tables: Tables) -> tuple[_Way, ...]:
    """The slowest of the links among the members, all that are equally slow.

    As the price has it: of all entries of the cluster file, those inside nodes too where one has two members.
    """
    nodes = [seats[p][s][r].node for p, s, r in members]
    by_entry: dict[str, dict[str, NodeFacts]] = defaultdict(dict)
    for node in nodes:
        by_entry[tables.fleet.cluster.nodes_by_name[node.name].entry.name][node.name] = node
    few = [node for of_entry in by_entry.values() for node in list(of_entry.values())[:2]]
    pairs = list(combinations(few, 2))
    if len({node.name for node in nodes}) < len(nodes):
        pairs += [(node, node) for node in few]
    took = [tables.fleet.link(a.name, b.name).seconds(PROBE_BYTES) for a, b in pairs]
    slow = [pair for pair, seconds in zip(pairs, took, strict=True) if seconds > (1 - 1e-9) * max(took)]
    return tuple(dict.fromkeys(_way(a, b) for a, b in slow))


def _way(a: NodeFacts, b: NodeFacts) -> _Way:
    scope = LinkScope.INTRA if a is b else LinkScope.INTER
    return _Way(_sorted((a.device.name, b.device.name)), scope)


def _sorted(between: tuple[str, str]) -> tuple[str, str]:
    a, b = sorted(between)
    return a, b


def with_links(
    links: Sequence[LinkTiming], factors: Sequence[LinkFactor], runs: Sequence[tuple[Run, Tables]]
) -> Iterator[LinkTiming]:
    """Links times the factors that are applied; one that only the cluster file knows gets a point."""
    by_way = {_Way(f.between, f.scope): f.factor for f in factors if f.applied}
    held = {_Way(_sorted(link.between), link.scope) for link in links}
    for link in links:
        factor = by_way.get(_Way(_sorted(link.between), link.scope))
        yield link if factor is None else _slowed(link, factor)
    for way, factor in by_way.items():
        if way not in held:
            point = LinkPoint(bytes=PROBE_BYTES, seconds=_stated(way, runs) * factor)
            yield LinkTiming(
                between=way.between, scope=way.scope, points=(point,), source=Source.INTERPOLATED
            )


def _slowed(link: LinkTiming, factor: float) -> LinkTiming:
    points = (
        LinkPoint(bytes=p.bytes, seconds=p.seconds * (factor if p.bytes > LATENCY_BYTES else 1.0))
        for p in link.points
    )
    return replace(link, points=tuple(points), source=Source.INTERPOLATED)


def _stated(way: _Way, runs: Sequence[tuple[Run, Tables]]) -> Seconds:
    """Of a probe between two nodes of these types, by the cluster file: the slowest of the runs."""
    fleets = [tables.fleet for _, tables in runs]
    return max(
        fleet.link(a.name, b.name).seconds(PROBE_BYTES)
        for fleet in fleets
        for a, b in combinations_with_replacement(fleet.nodes.values(), 2)
        if _way(a, b) == way
    )


def with_steps(steps: Sequence[StepTiming], factors: Sequence[StepFactor]) -> Iterator[StepTiming]:
    """Fixed costs as the runs had them."""
    found = {f.device: StepTiming(device=f.device, step_s=f.after_s) for f in factors}
    yield from (found.pop(step.device, step) for step in steps)
    yield from found.values()
