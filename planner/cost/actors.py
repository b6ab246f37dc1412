"""From a plan to what the simulation plays: replicas with their costs, and the messages between them."""

from collections.abc import Iterator
from dataclasses import dataclass

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.rows import Overlap, consecutive, overlaps
from arachne_runtime.units import Bytes, Seconds

from .fleet import NodeFacts
from .simulate import Actor, Sources, Stages
from .tables import Tables


@dataclass(frozen=True, slots=True)
class Seat:
    """One replica in its node."""

    replica: Replica
    node: NodeFacts

    @property
    def tp(self) -> int:
        """Devices of its tensor-parallel group."""
        return len(self.replica.devices)


Seats = tuple[tuple[tuple[Seat, ...], ...], ...]
"""By pipeline, stage and replica."""


def seats_of(plan: Plan, tables: Tables) -> Seats:
    """Every replica with its node. Raises UsageError for a device that the cluster does not have."""
    return tuple(
        tuple(tuple(_seat(replica, tables) for replica in stage.replicas) for stage in pipeline.stages)
        for pipeline in plan.pipelines
    )


def _seat(replica: Replica, tables: Tables) -> Seat:
    node = tables.fleet.node(node_of(replica.devices[0]))
    for device in replica.devices:
        tables.fleet.check_device(device, node)
    return Seat(replica, node)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The messages over one boundary of a pipeline."""

    before: tuple[Seat, ...]
    after: tuple[Seat, ...]
    overlaps: tuple[Overlap, ...]
    sample_bytes: int
    """Bytes a sample that cross."""


def crossings(pipeline: Pipeline, seats: tuple[tuple[Seat, ...], ...], tables: Tables) -> list[Crossing]:
    """All boundaries of a pipeline, in order."""
    found = []
    for s in range(1, len(pipeline.stages)):
        before, after = pipeline.stages[s - 1], pipeline.stages[s]
        rows = consecutive(before.shares), consecutive(after.shares)
        found.append(
            Crossing(seats[s - 1], seats[s], overlaps(*rows), tables.output_bytes[before.layers[1] - 1])
        )
    return found


@dataclass(frozen=True, slots=True)
class Crowd:
    """Devices of each node that send off it in one direction: they share its NIC."""

    forward: dict[str, int]
    backward: dict[str, int]


def crowd_of(all_crossings: list[list[Crossing]]) -> Crowd:
    """Count them over all pipelines: a device sends with ``min(tp, tp of the other side)`` of its group."""
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    for crossing in (c for row in all_crossings for c in row):
        out, back = [0] * len(crossing.before), [0] * len(crossing.after)
        for o in crossing.overlaps:
            a, b = crossing.before[o.sender], crossing.after[o.receiver]
            if a.node is not b.node:
                senders = min(a.tp, b.tp)
                out[o.sender] = max(out[o.sender], senders)
                back[o.receiver] = max(back[o.receiver], senders)
        for seat, n in zip(crossing.before, out, strict=True):
            forward[seat.node.name] = forward.get(seat.node.name, 0) + n
        for seat, n in zip(crossing.after, back, strict=True):
            backward[seat.node.name] = backward.get(seat.node.name, 0) + n
    return Crowd(forward, backward)


@dataclass(frozen=True, slots=True)
class Messages:
    """One boundary's messages, by overlap: seconds with each end's other messages counted in, and bytes."""

    forward: list[Seconds]
    backward: list[Seconds]
    bytes: list[Bytes]


def messages_of(crossing: Crossing, crowd: Crowd, tables: Tables) -> Messages:
    """An end that serves several messages of a micro-batch serves them one after the other."""
    forward: list[Seconds] = []
    backward: list[Seconds] = []
    sizes = [len(o.rows) * crossing.sample_bytes for o in crossing.overlaps]
    for o, size in zip(crossing.overlaps, sizes, strict=True):
        a, b = crossing.before[o.sender], crossing.after[o.receiver]
        link = tables.fleet.link(a.node.name, b.node.name)
        senders = max(1, crowd.forward.get(a.node.name, 1)), max(1, crowd.backward.get(b.node.name, 1))
        forward.append(-(-b.tp // a.tp) * link.seconds(size, senders[0]))
        backward.append(-(-a.tp // b.tp) * link.seconds(size, senders[1]))
    return Messages(_busiest_end(crossing, forward), _busiest_end(crossing, backward), sizes)


def _busiest_end(crossing: Crossing, alone: list[Seconds]) -> list[Seconds]:
    if len(alone) == 1:
        return alone
    at_sender, at_receiver = _loads(crossing, alone)
    return [max(at_sender[o.sender], at_receiver[o.receiver]) for o in crossing.overlaps]


def _loads(crossing: Crossing, seconds: list[Seconds]) -> tuple[list[Seconds], list[Seconds]]:
    at_sender, at_receiver = [0.0] * len(crossing.before), [0.0] * len(crossing.after)
    for o, s in zip(crossing.overlaps, seconds, strict=True):
        at_sender[o.sender] += s
        at_receiver[o.receiver] += s
    return at_sender, at_receiver


def actors_of(
    pipeline: Pipeline,
    seats: tuple[tuple[Seat, ...], ...],
    boundaries: list[Crossing],
    crowd: Crowd,
    tables: Tables,
) -> Stages:
    """What the simulation plays for one pipeline."""
    messages = [messages_of(c, crowd, tables) for c in boundaries]
    return tuple(
        tuple(_stage_actors(s, stage, seats[s], boundaries, messages, tables))
        for s, stage in enumerate(pipeline.stages)
    )


def _stage_actors(
    s: int,
    stage: Stage,
    seats: tuple[Seat, ...],
    crossed: list[Crossing],
    messages: list[Messages],
    tables: Tables,
) -> Iterator[Actor]:
    for r, seat in enumerate(seats):
        forward, backward = tables.stage_seconds(
            *stage.layers, seat.node.device.name, seat.tp, seat.replica.share, stage.recompute
        )
        before: Sources = ()
        behind: Sources = ()
        busy_before = busy_behind = 0.0
        if s > 0:
            mine = [(o.sender, i) for i, o in enumerate(crossed[s - 1].overlaps) if o.receiver == r]
            busy_before = _busy(seat, [messages[s - 1].bytes[i] for _, i in mine])
            before = _arrivals(mine, messages[s - 1].forward, busy_before)
        if s < len(crossed):
            mine = [(o.receiver, i) for i, o in enumerate(crossed[s].overlaps) if o.sender == r]
            busy_behind = _busy(seat, [messages[s].bytes[i] for _, i in mine])
            behind = _arrivals(mine, messages[s].backward, busy_behind)
        yield Actor(forward + busy_before, backward + busy_behind, before, behind, busy_behind, busy_before)


def _busy(seat: Seat, sizes: list[Bytes]) -> Seconds:
    """Computing that the messages of one direction cost this end."""
    device = seat.node.device
    return sum(device.hop_busy_s + size * device.hop_busy_s_per_byte for size in sizes)


def _arrivals(mine: list[tuple[int, int]], seconds: list[Seconds], busy: Seconds) -> Sources:
    """Messages to one replica; what it does itself to receive them is part of its own action."""
    return tuple((j, max(0.0, seconds[i] - busy)) for j, i in mine)
