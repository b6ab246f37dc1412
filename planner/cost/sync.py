"""What follows a rank's last action: reductions in descending block order, then the world's all-reduce."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from arachne_runtime.plan.limits import BUCKET_BYTES
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.schedule import num_rows
from arachne_runtime.plan.segments import segments
from arachne_runtime.units import Seconds

from .actors import Seat, Seats
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
    rows: frozenset[tuple[int, int]]
    """(pipeline, row): who must be free for it; all replicas of a stage are in the same groups."""
    tie: bool = False


def reductions_of(plan: Plan, seats: Seats, tables: Tables) -> list[Reduction]:
    """Every reduction of a step, in the order in which each rank issues its own."""
    groups = [g for g in _groups(plan, tables) if len(g.members) > 1 and g.parameters > 0]
    rings = [Ring.of([seats[p][s][r] for p, s, r in g.members]) for g in groups]
    crowd = _crowd(groups, rings)
    gradient = tables.model.bytes_per_parameter.gradient
    found = []
    for group, ring in zip(groups, rings, strict=True):
        size = group.parameters * gradient / ring.least_tp
        senders = max(crowd.get(node, 1) for node in ring.nodes)
        found.append(Reduction(group.name, group.members, _ring_time(size, ring, senders, tables)))
    return found


def rows_of(plan: Plan) -> tuple[int, ...]:
    """Sets of devices of each pipeline: stage s runs on set s modulo their number."""
    return tuple(num_rows(plan.schedule, pipeline) for pipeline in plan.pipelines)


def _groups(plan: Plan, tables: Tables) -> Iterable[_Group]:
    rows = rows_of(plan)
    for segment in reversed(segments(plan)):
        held = tables.own_parameters[segment.stop] - tables.own_parameters[segment.start]
        yield _group(f"{segment.start}:{segment.stop}", plan, rows, segment.holders, int(held))
    for tie in tables.ties:
        holders = [
            (p, s)
            for p, pipeline in enumerate(plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
            if any(b in stage.blocks for b in tie.blocks)
        ]
        yield _group(f"tie:{tie.blocks[0]}", plan, rows, holders, tie.parameters, tie=True)


def _group(
    name: str,
    plan: Plan,
    rows: tuple[int, ...],
    holders: Sequence[tuple[int, int]],
    parameters: int,
    tie: bool = False,
) -> _Group:
    """The replicas of some stages; a device that holds several of them (interleaved) takes part once."""
    found = {(p, s % rows[p]): (p, s) for p, s in reversed(holders)}
    members = tuple(
        (p, s, r) for p, s in sorted(found.values()) for r in range(len(plan.pipelines[p].stages[s].replicas))
    )
    return _Group(name, members, parameters, frozenset(found), tie)


@dataclass(frozen=True, slots=True)
class Ring:
    """Who takes part in a reduction, as far as its seconds depend on it."""

    nodes: Mapping[str, int]
    """Members in each node."""
    size: int
    least_tp: int
    """The member with the fewest devices moves the largest shard."""
    most_tp: int
    """Devices of a member reduce their shards at once over one NIC."""

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> "Ring":
        """From its members."""
        nodes: dict[str, int] = {}
        for seat in seats:
            nodes[seat.node.name] = nodes.get(seat.node.name, 0) + 1
        degrees = [seat.tp for seat in seats]
        return cls(nodes, len(seats), min(degrees), max(degrees))


def _crowd(groups: Sequence[_Group], rings: Sequence[Ring]) -> dict[str, int]:
    """Devices of each node that send off it at once: rings through it that no rank is in twice, times TP.

    Rings of a rank go one after the other, so two rings run at once only where no rank is in both.
    A rank's segments are neighbours, so taking them greedily in order finds the most.
    """
    senders: dict[str, int] = {}
    taken: dict[str, frozenset[tuple[int, int]]] = {}
    for group, ring in zip(groups, rings, strict=True):
        if len(ring.nodes) == 1 or group.tie:
            continue
        for node in ring.nodes:
            last = taken.get(node)
            if last is None or last.isdisjoint(group.rows):
                taken[node] = group.rows
                senders[node] = senders.get(node, 0) + ring.most_tp
    return senders


def _ring_time(size: float, ring: Ring, senders: int, tables: Tables) -> Seconds:
    """The slowest link sets the pace of a ring: any of its nodes may stand beside any other in it."""
    links = tables.fleet.links_among(tuple(ring.nodes), max(ring.nodes.values()) > 1)
    buckets = max(1, int(size) // BUCKET_BYTES)
    return buckets * max(
        ring_seconds(link, size / buckets, ring.size, max(senders, ring.most_tp) if link.shared else 1)
        for link in links
    )


def reduce(
    reductions: list[Reduction], played: list[Played], rows: tuple[int, ...]
) -> tuple[list[tuple[Seconds, Seconds]], list[list[list[Seconds]]]]:
    """Start and end of each reduction, and when each replica of a row is through with all of its own.

    A reduction starts when its last member has reached it: every rank issues its own in the one global order.
    """
    free = [[list(stage) for stage in p.ready_s[:n]] for p, n in zip(played, rows, strict=True)]
    spans = []
    for reduction in reductions:
        members = [(free[p][s % rows[p]], r) for p, s, r in reduction.members]
        start = max(row[r] for row, r in members)
        end = start + reduction.seconds
        for row, r in members:
            row[r] = end
        spans.append((start, end))
    return spans, free


def commit_seconds(seats: Seats, tables: Tables) -> Seconds:
    """The world's all-reduce of a few bytes, a tree over the slowest link, and a step's fixed cost.

    The latter is what the profile says of a step that computes nothing, on the slowest of the plan's types.
    """
    flat = [seat for pipeline in seats for stage in pipeline for seat in stage]
    ranks = len({device for seat in flat for device in seat.replica.devices})
    step_s = max(map(tables.profile.step, {seat.node.device.name for seat in flat}))
    if ranks == 1:
        return step_s
    nodes = tuple(dict.fromkeys(seat.node.name for seat in flat))
    links = tables.fleet.links_among(nodes, ranks > len(nodes))
    return step_s + 2 * (ranks - 1).bit_length() * max(link.seconds(COMMIT_BYTES) for link in links)
