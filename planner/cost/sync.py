"""What follows a rank's last action: reductions in descending block order, then the world's all-reduce."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from arachne_runtime.plan.plan import Plan, Stage
from arachne_runtime.plan.schedule import num_rows
from arachne_runtime.plan.segments import segments
from arachne_runtime.units import Seconds

from .rings import Ring
from .seats import Seat, Seats
from .simulate import Played
from .tables import Tables

COMMIT_BYTES = 64
"""The world's all-reduce at the end of a step: norm, loss and counts in float64."""

ONE_STAGE = (1.0, 0.5, 0.0, 0.0)
"""Of an all-reduce, by ZeRO stage, where one stage holds the blocks: ZeRO-1 scatters the sums (its gather
of weights follows the optimizer), ZeRO-2 and 3 have summed in every backward (``zero.py``)."""

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
    size: float
    """Bytes of gradients that a member sums; what ZeRO-2 sums earlier, and scatters, left out."""
    ring: Ring
    rows: frozenset[tuple[int, int]]
    """(pipeline, row): who must be free for it; all replicas of a stage are in the same groups."""
    tie: bool = False


def reductions_of(plan: Plan, seats: Seats, tables: Tables) -> list[Reduction]:
    """Every reduction of a step, in the order in which each rank issues its own."""
    groups = [g for g in _groups(plan, seats, tables) if g.ring.size > 1 and g.size > 0]
    crowd = _crowd(groups)
    return [
        Reduction(
            group.name,
            group.members,
            group.ring.seconds(group.size, tables, max(crowd.get(node, 1) for node in group.ring.nodes)),
        )
        for group in groups
    ]


def rows_of(plan: Plan) -> tuple[int, ...]:
    """Sets of devices of each pipeline: stage s runs on set s modulo their number."""
    return tuple(num_rows(plan.schedule, pipeline) for pipeline in plan.pipelines)


def _groups(plan: Plan, seats: Seats, tables: Tables) -> Iterator[_Group]:
    gradient = tables.model.bytes_per_parameter.gradient
    for segment in reversed(segments(plan)):
        holders = _Holders.of(plan, seats, segment.holders)
        name, a, b = f"{segment.start}:{segment.stop}", segment.start, segment.stop
        experts = tables.expert_parameters[b] - tables.expert_parameters[a]
        dense = tables.own_parameters[b] - tables.own_parameters[a] - experts
        yield holders.dense(name, dense * gradient)
        if experts:
            yield holders.experts(f"{name}:experts", experts * gradient)
    for tie in tables.ties:
        places = [
            (p, s)
            for p, pipeline in enumerate(plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
            if any(b in stage.blocks for b in tie.blocks)
        ]
        holders = _Holders.of(plan, seats, places)
        group = holders.dense(f"tie:{tie.blocks[0]}", tie.parameters * gradient)
        yield replace(group, tie=True)


@dataclass(frozen=True, slots=True)
class _Holders:
    """The stages that hold some blocks, and their replicas."""

    stages: list[Stage]
    seats: list[tuple[Seat, ...]]
    members: tuple[Address, ...]
    rows: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, plan: Plan, seats: Seats, places: Sequence[tuple[int, int]]) -> "_Holders":
        """A device that holds several of these stages (interleaved) takes part once."""
        rows = rows_of(plan)
        found = {(p, s % rows[p]): (p, s) for p, s in reversed(places)}
        once = sorted(found.values())
        members = tuple((p, s, r) for p, s in once for r in range(len(seats[p][s])))
        stages = [plan.pipelines[p].stages[s] for p, s in once]
        return cls(stages, [seats[p][s] for p, s in once], members, frozenset(found))

    def dense(self, name: str, size: float) -> _Group:
        """What tensor parallelism divides."""
        ring = Ring.of([seat for seats in self.seats for seat in seats])
        size, ring = self._under_zero(size / ring.least_tp, ring)
        return _Group(name, self.members, size, ring, self.rows)

    def experts(self, name: str, size: float) -> _Group:
        """What tiles of experts divide; only the devices that hold the same experts sum them."""
        tile = min(stage.expert_parallel * stage.expert_tensor for stage in self.stages)
        ring = Ring.of_experts(self.stages)
        if len(self.stages) == 1:
            size *= ONE_STAGE[self.stages[0].zero]
        return _Group(name, self.members, size / tile, ring, self.rows)

    def _under_zero(self, size: float, ring: Ring) -> tuple[float, Ring]:
        """One stage: what is left after its own collectives. Several: shards are summed across them."""
        if len(self.stages) == 1:
            return size * ONE_STAGE[self.stages[0].zero], ring
        if all(stage.zero >= 2 for stage in self.stages):
            return size / min(map(len, self.seats)), Ring.of_shards(self.seats)
        return size, ring


def _crowd(groups: Sequence[_Group]) -> dict[str, int]:
    """Devices of each node that send off it at once: rings through it that no rank is in twice, times TP.

    Rings of a rank go one after the other, so two rings run at once only where no rank is in both.
    A rank's segments are neighbours, so taking them greedily in order finds the most.
    """
    senders: dict[str, int] = {}
    taken: dict[str, frozenset[tuple[int, int]]] = {}
    for group in groups:
        if len(group.ring.nodes) == 1 or group.tie:
            continue
        for node in group.ring.nodes:
            last = taken.get(node)
            if last is None or last.isdisjoint(group.rows):
                taken[node] = group.rows
                senders[node] = senders.get(node, 0) + group.ring.most_tp
    return senders


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
