"""What runs say of the seconds between computing: the fixed cost of a step, and sums of gradients on links.

Messages between stages leave no trace of their own: a rank that waits for one also waits for the stage
before, and two ranks' clocks start apart. So links are judged by the sums of gradients.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

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

from ..cost.seats import Seats, seats_of
from ..cost.sync import Address, Reduction, commit_seconds, reductions_of
from ..cost.tables import Tables
from .factors import DRIFT, NORMAL_95
from .observe import FLOOR
from .run import Run, spent

LINK_PRIOR = 0.7
"""Deviation of the log of a link's factor before anything has run: a factor of two either way."""
LINK_NOISE = 0.15
"""Deviation of the log of one run's sums on a link: what else goes over it, how well ranks meet."""
REST_PRIOR, REST_NOISE = 0.7, 0.3
"""The same of a step's fixed cost: the demonstration's is 14 to 17 ms of 1.6 s (docs/measuring.md)."""


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
    """Whether the profile holds the link, and the runs say that it is slower."""

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


def link_factors(profile: Profile, runs: Sequence[tuple[Run, Tables]]) -> tuple[LinkFactor, ...]:
    """Factors of the links that set the pace of sums of gradients.

    A sum that took less than its price may have run beside the last backward, so only slower links are
    evidence: a factor whose interval reaches below 1 is told and not applied.
    """
    found: dict[_Way, list[float]] = defaultdict(list)
    for run, tables in runs:
        seats = seats_of(run.plan, tables)
        measured = _sums_of(run)
        for way, reductions in _by_way(reductions_of(run.plan, seats, tables), seats, tables).items():
            told = [r for r in reductions if measured.get(r.name, 0.0) > 0]
            predicted_s = math.fsum(r.seconds for r in told)
            if predicted_s > 0:
                found[way].append(math.log(math.fsum(measured[r.name] for r in told) / predicted_s))
    held = {_Way(_sorted(link.between), link.scope) for link in profile.links}
    return tuple(_link_factor(way, logs, way in held) for way, logs in sorted(found.items()))


def _link_factor(way: _Way, logs: Sequence[float], held: bool) -> LinkFactor:
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
        applied=held and low > 1,
    )


def _sums_of(run: Run) -> dict[str, Seconds]:
    """Seconds of each sum of gradients: the least of its ranks, as the one that comes last does not wait."""
    by_rank: dict[tuple[str, int], list[Seconds]] = defaultdict(list)
    for record in run.counted:
        if record.kind is RecordKind.REDUCE:
            by_rank[record.name, record.rank].append(spent(record))
    least: dict[str, Seconds] = {}
    for (name, _), seconds in by_rank.items():
        least[name] = min(least.get(name, math.inf), statistics.median(seconds))
    return least


def _by_way(reductions: Iterable[Reduction], seats: Seats, tables: Tables) -> dict[_Way, list[Reduction]]:
    """Sums by the slowest link among their members."""
    found: dict[_Way, list[Reduction]] = defaultdict(list)
    for reduction in reductions:
        found[_slowest(reduction.members, seats, tables)].append(reduction)
    return found


def _slowest(members: Sequence[Address], seats: Seats, tables: Tables) -> _Way:
    """Of the links among the nodes; within a node only where all members are in it."""
    nodes = {(node := seats[p][s][r].node).name: node for p, s, r in members}
    pairs = [(a, b) for a, b in combinations_with_replacement(nodes, 2) if a != b or len(nodes) == 1]
    a, b = max(pairs, key=lambda pair: tables.fleet.link(*pair).seconds(2**20))
    scope = LinkScope.INTRA if a == b else LinkScope.INTER
    return _Way(_sorted((nodes[a].device.name, nodes[b].device.name)), scope)


def _sorted(between: tuple[str, str]) -> tuple[str, str]:
    a, b = sorted(between)
    return a, b


def with_links(links: Sequence[LinkTiming], factors: Sequence[LinkFactor]) -> Iterator[LinkTiming]:
    """Links times the factors that are applied."""
    by_way = {_Way(f.between, f.scope): f.factor for f in factors if f.applied}
    for link in links:
        factor = by_way.get(_Way(_sorted(link.between), link.scope))
        if factor is None:
            yield link
            continue
        points = tuple(LinkPoint(bytes=p.bytes, seconds=p.seconds * factor) for p in link.points)
        yield replace(link, points=points, source=Source.INTERPOLATED)


def with_steps(steps: Sequence[StepTiming], factors: Sequence[StepFactor]) -> Iterator[StepTiming]:
    """Fixed costs as the runs had them."""
    found = {f.device: StepTiming(device=f.device, step_s=f.after_s) for f in factors}
    yield from (found.pop(step.device, step) for step in steps)
    yield from found.values()
