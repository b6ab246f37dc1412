"""What follows a rank's last action: reductions in descending block order, then the world's all-reduce."""

from collections.abc import Iterable
from dataclasses import dataclass

from arachne_runtime.plan.cluster import index_of
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.segments import segments
from arachne_runtime.units import Seconds

from .layout import Seat, Seats
from .simulate import Played
from .tables import Tables, ring_seconds

COMMIT_BYTES = 64
"""The world's all-reduce at the end of a step: norm, loss and counts in float64."""

Address = tuple[int, int, int]
"""(pipeline, stage, replica)."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One sum of gradients over the replicas that hold the same blocks."""

    name: str
    """``7:26``, or ``tie:0`` for parameters that blocks share."""
    members: tuple[Address, ...]
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    members: tuple[Address, ...]
    parameters: int


def reductions_of(plan: Plan, seats: Seats, tables: Tables) -> list[Reduction]:
    """Every reduction of a step, in the order in which each rank issues its own."""
    groups = [g for g in _groups(plan, tables) if len(g.members) > 1 and g.parameters > 0]
    rings = [_ring(g.members, seats) for g in groups]
    crowd = _crowd(rings)
    gradient = tables.model.bytes_per_parameter.gradient
    found = []
    for group, ring in zip(groups, rings, strict=True):
        size = group.parameters * gradient / min(seat.tp for seat in ring)
        found.append(Reduction(group.name, group.members, _ring_time(size, ring, crowd, tables)))
    return found


def _groups(plan: Plan, tables: Tables) -> Iterable[_Group]:
    for segment in reversed(segments(plan)):
        held = tables.own_parameters[segment.stop] - tables.own_parameters[segment.start]
        yield _Group(f"{segment.start}:{segment.stop}", _replicas(plan, segment.holders), int(held))
    for tie in tables.ties:
        holders = [
            (p, s)
            for p, pipeline in enumerate(plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
            if any(b in stage.blocks for b in tie.blocks)
        ]
        yield _Group(f"tie:{tie.blocks[0]}", _replicas(plan, holders), tie.parameters)


def _replicas(plan: Plan, holders: Iterable[tuple[int, int]]) -> tuple[Address, ...]:
    return tuple((p, s, r) for p, s in holders for r in range(len(plan.pipelines[p].stages[s].replicas)))


def _ring(members: Iterable[Address], seats: Seats) -> list[Seat]:
    """Members node by node, so that a ring enters and leaves each node once."""
    ring = [seats[p][s][r] for p, s, r in members]
    return sorted(ring, key=lambda seat: (seat.node.order, index_of(seat.replica.devices[0])))


def _crowd(rings: list[list[Seat]]) -> dict[str, int]:
    """Devices of each node that send off it in any ring; rings of one node may run at once, so all count."""
    senders: dict[str, dict[str, int]] = {}
    for ring in rings:
        for a, b in _edges(ring):
            if a.node is not b.node:
                senders.setdefault(a.node.name, {})[a.replica.devices[0]] = a.tp
    return {node: sum(devices.values()) for node, devices in senders.items()}


def _edges(ring: list[Seat]) -> Iterable[tuple[Seat, Seat]]:
    return zip(ring, [*ring[1:], ring[0]], strict=True)


def _ring_time(size: float, ring: list[Seat], crowd: dict[str, int], tables: Tables) -> Seconds:
    """The slowest edge sets the pace of a ring."""
    slowest = 0.0
    seen: set[tuple[int, int]] = set()
    for a, b in _edges(ring):
        senders = crowd[a.node.name] if a.node is not b.node else 1
        link = tables.fleet.link(a.node.name, b.node.name)
        if (id(link), senders) in seen:
            continue
        seen.add((id(link), senders))
        slowest = max(slowest, ring_seconds(link, size, len(ring), senders))
    return slowest


def reduce(
    reductions: list[Reduction], played: list[Played]
) -> tuple[list[tuple[Seconds, Seconds]], list[list[list[Seconds]]]]:
    """Start and end of each reduction, and when each replica is through with all of its own.

    A reduction starts when its last member has reached it: every rank issues its own in the one global order.
    """
    free = [[list(stage) for stage in p.ready_s] for p in played]
    spans = []
    for reduction in reductions:
        start = max(free[p][s][r] for p, s, r in reduction.members)
        end = start + reduction.seconds
        for p, s, r in reduction.members:
            free[p][s][r] = end
        spans.append((start, end))
    return spans, free


def commit_seconds(seats: Seats, tables: Tables) -> Seconds:
    """The world's all-reduce of a few bytes: a tree up and down over the slowest neighbour link."""
    flat = [seat for pipeline in seats for stage in pipeline for seat in stage]
    ranks = sum(seat.tp for seat in flat)
    if ranks == 1:
        return 0.0
    ring = sorted(flat, key=lambda seat: seat.node.order)
    links = {id(k): k for k in (tables.fleet.link(a.node.name, b.node.name) for a, b in _edges(ring))}
    return 2 * (ranks - 1).bit_length() * max(link.seconds(COMMIT_BYTES) for link in links.values())
