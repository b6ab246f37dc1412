"""From a plan to what the simulation plays: replicas with their costs, and the messages between them."""

from dataclasses import dataclass
from functools import lru_cache

from arachne_runtime.plan.plan import Pipeline, Stage
from arachne_runtime.plan.rows import Overlap, consecutive, overlaps
from arachne_runtime.units import Bytes, Seconds

from .experts import exchange_seconds, groups_of
from .seats import Seat, Seats, seats_of
from .simulate import Actor, Sources, Stages
from .tables import Tables
from .zero import ZeroTraffic, with_zero

__all__ = ["Seat", "Seats", "actors_of", "crossings", "crowd_of", "messages_of", "seats_of"]

WEIGHTS_OF_BACKWARD = 0.5
"""Of a measured backward: the gradient of the weights. Each of a linear layer's two products has the FLOPs of
its forward (arXiv 2401.10241, table 1); attention has none for weights; no profile measures the halves."""


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
        sample_bytes = tables.output_bytes[before.layers[1] - 1]
        found.append(Crossing(seats[s - 1], seats[s], _overlaps(before.shares, after.shares), sample_bytes))
    return found


@lru_cache(maxsize=4096)
def _overlaps(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Overlap, ...]:
    """Of the rows of two stages with these shares."""
    return overlaps(consecutive(before), consecutive(after))


@dataclass(frozen=True, slots=True)
class Crowd:
    """Devices of each node that send off it in one direction: they share its NIC."""

    forward: dict[str, int]
    backward: dict[str, int]


def crowd_of(all_crossings: list[list[Crossing]]) -> Crowd:
    """Count them over all pipelines: a device sends with ``min(tp, tp of the other side)`` of its group."""
    forward: dict[str, dict[str, int]] = {}
    backward: dict[str, dict[str, int]] = {}
    for crossing in (c for row in all_crossings for c in row):
        out, back = [0] * len(crossing.before), [0] * len(crossing.after)
        for o in crossing.overlaps:
            a, b = crossing.before[o.sender], crossing.after[o.receiver]
            if a.node is not b.node:
                senders = min(a.tp, b.tp)
                out[o.sender] = max(out[o.sender], senders)
                back[o.receiver] = max(back[o.receiver], senders)
        _count(forward, crossing.before, out)
        _count(backward, crossing.after, back)
    return Crowd(*({node: sum(n.values()) for node, n in both.items()} for both in (forward, backward)))


def _count(found: dict[str, dict[str, int]], seats: tuple[Seat, ...], senders: list[int]) -> None:
    """By node and replica: one that holds several stages (interleaved) sends for one at a time."""
    for seat, n in zip(seats, senders, strict=True):
        of_node = found.setdefault(seat.node.name, {})
        first = seat.replica.devices[0]
        of_node[first] = max(of_node.get(first, 0), n)


@dataclass(frozen=True, slots=True)
class Direction:
    """One boundary's messages in one direction, by overlap."""

    landed_s: list[Seconds]
    """Seconds on the link, each end's other messages counted in: it serves them one after the other."""
    sender_busy_s: list[Seconds]
    """Computing that a message costs the end that sends it."""
    receiver_busy_s: list[Seconds]


@dataclass(frozen=True, slots=True)
class Messages:
    """One boundary's messages there and back."""

    forward: Direction
    backward: Direction


def messages_of(crossing: Crossing, crowd: Crowd, tables: Tables) -> Messages:
    """Outputs to the next stage and gradients to the one before."""
    sizes = [len(o.rows) * crossing.sample_bytes for o in crossing.overlaps]
    pairs = [(crossing.before[o.sender], crossing.after[o.receiver]) for o in crossing.overlaps]
    forward = [_hop(a, b, n, crowd.forward, tables) for (a, b), n in zip(pairs, sizes, strict=True)]
    backward = [_hop(b, a, n, crowd.backward, tables) for (a, b), n in zip(pairs, sizes, strict=True)]
    there = _busy([a for a, _ in pairs], sizes, forward), _busy([b for _, b in pairs], sizes, forward)
    back = _busy([b for _, b in pairs], sizes, backward), _busy([a for a, _ in pairs], sizes, backward)
    return Messages(
        Direction(_busiest_end(crossing, forward), *there), Direction(_busiest_end(crossing, backward), *back)
    )


def _hop(sender: Seat, receiver: Seat, size: Bytes, crowd: dict[str, int], tables: Tables) -> Seconds:
    """Each rank of the smaller tensor-parallel group sends or takes a part; the receiver's ranks gather them.

    Megatron-LM's scatter and gather (arXiv 2104.04473, §4.1), DeepSpeed's partitioned pipe tensors.
    """
    link = tables.fleet.link(sender.node.name, receiver.node.name)
    streams = min(sender.tp, receiver.tp)
    seconds = link.seconds(-(-size // streams), max(streams, crowd.get(sender.node.name, 1)))
    if receiver.tp == 1:
        return seconds
    inside = tables.fleet.link(receiver.node.name, receiver.node.name)
    return seconds + (receiver.tp - 1) * inside.seconds(-(-size // receiver.tp))


def _busy(seats: list[Seat], sizes: list[Bytes], link_s: list[Seconds]) -> list[Seconds]:
    """Computing that each message costs the end in ``seats``."""
    found = []
    for seat, size, seconds in zip(seats, sizes, link_s, strict=True):
        device = seat.node.device
        own = device.hop_busy_s + size * device.hop_busy_s_per_byte
        found.append(own if device.hop_overlaps else own + seconds)
    return found


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


def what_actors_depend_on(
    pipeline: Pipeline, seats: tuple[tuple[Seat, ...], ...], crowd: Crowd, tables: Tables
) -> object:
    """Equal for pipelines played alike: the same stages, in nodes that only their names tell apart."""
    numbers: dict[str, int] = {}
    stages = tuple(
        (
            (stage.layers, stage.recompute, stage.zero, stage.expert_parallel, stage.expert_tensor),
            tuple([(numbers.setdefault(s.node.name, len(numbers)), s.tp, s.replica.share) for s in seated]),
        )
        for stage, seated in zip(pipeline.stages, seats, strict=True)
    )
    nodes = tuple(
        [(tables.fleet.kind_of(n), crowd.forward.get(n, 1), crowd.backward.get(n, 1)) for n in numbers]
    )
    return stages, nodes


def _stage_actors(
    s: int,
    stage: Stage,
    seats: tuple[Seat, ...],
    crossed: list[Crossing],
    messages: list[Messages],
    tables: Tables,
) -> list[Actor]:
    exchange = exchange_seconds(stage, seats, tables)
    zero = ZeroTraffic.of(stage, seats, tables)
    found = []
    for r, seat in enumerate(seats):
        forward, backward = tables.stage_seconds(
            *stage.layers, seat.node.device.name, seat.tp, seat.replica.share, stage.recompute
        )
        weight = WEIGHTS_OF_BACKWARD * (backward - forward if stage.recompute else backward)
        forward, backward = forward + exchange, backward + exchange * (2 if stage.recompute else 1)
        forward, backward = with_zero(stage, zero, forward, backward)
        before: Sources = ()
        behind: Sources = ()
        forward_tail = backward_tail = 0.0
        if s > 0:
            mine = [(o.sender, i) for i, o in enumerate(crossed[s - 1].overlaps) if o.receiver == r]
            busy, before = _arrivals(mine, messages[s - 1].forward)
            forward += busy
            backward_tail = sum(messages[s - 1].backward.sender_busy_s[i] for _, i in mine)
        if s < len(crossed):
            mine = [(o.receiver, i) for i, o in enumerate(crossed[s].overlaps) if o.sender == r]
            busy, behind = _arrivals(mine, messages[s].backward)
            backward += busy
            forward_tail = sum(messages[s].forward.sender_busy_s[i] for _, i in mine)
        found.append(Actor(forward, backward, before, behind, forward_tail, backward_tail, weight))
    return in_step(found, groups_of(stage)) if exchange else found


def _arrivals(mine: list[tuple[int, int]], direction: Direction) -> tuple[Seconds, Sources]:
    """Messages to one replica; what it does itself to receive them is part of its own action."""
    busy = sum(direction.receiver_busy_s[i] for _, i in mine)
    return busy, tuple((j, max(0.0, direction.landed_s[i] - busy)) for j, i in mine)


def in_step(actors: list[Actor], groups: list[int]) -> list[Actor]:
    """Replicas that exchange tokens: each waits for what any of its group waits for, and takes as long."""
    by_group: dict[int, list[Actor]] = {}
    for actor, group in zip(actors, groups, strict=True):
        by_group.setdefault(group, []).append(actor)
    slowest = {group: _slowest(members) for group, members in by_group.items()}
    return [slowest[group] for group in groups]


def _slowest(members: list[Actor]) -> Actor:
    return Actor(
        forward_s=max(a.forward_s for a in members),
        backward_s=max(a.backward_s for a in members),
        from_before=_all_sources([a.from_before for a in members]),
        from_behind=_all_sources([a.from_behind for a in members]),
        forward_tail_s=max(a.forward_tail_s for a in members),
        backward_tail_s=max(a.backward_tail_s for a in members),
        weight_s=min(a.weight_s for a in members),
    )


def _all_sources(several: list[Sources]) -> Sources:
    """The later of two messages from one sender counts."""
    found: dict[int, Seconds] = {}
    for sources in several:
        for j, seconds in sources:
            found[j] = max(found.get(j, 0.0), seconds)
    return tuple(sorted(found.items()))
