"""Event simulation of one pipeline's schedule: every replica its own clock, messages between their overlaps.

Rules (the engine's): an action starts when the one before it is done and its inputs are there; the receive of
an action is posted when the action before it starts, so a message lands one hop after that at the earliest; a
message leaves when its action ends. All are maxima of sums: no longer duration ever makes anything earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import Work, stage_actions
from arachne_runtime.units import Seconds

Sources = tuple[tuple[int, Seconds], ...]
"""(replica of the neighbour stage, seconds of its message)."""


@dataclass(frozen=True, slots=True)
class Actor:
    """One replica of a stage, as the simulation sees it."""

    forward_s: Seconds
    backward_s: Seconds
    from_before: Sources = ()
    """Whose outputs a forward waits for; empty at the first stage."""
    from_behind: Sources = ()
    """Whose gradients a backward waits for; empty at the last stage."""
    forward_tail_s: Seconds = 0.0
    """Busy with sending after a forward, before the next action may start."""
    backward_tail_s: Seconds = 0.0


Stages = tuple[tuple[Actor, ...], ...]


@dataclass(frozen=True, slots=True)
class Played:
    """When every replica is done, by stage and replica, and when each action ended."""

    ready_s: tuple[tuple[Seconds, ...], ...]
    ends: tuple[tuple[tuple[list[Seconds], list[Seconds]], ...], ...]
    """By stage and replica: ends of forwards and of backwards, by micro-batch."""

    @property
    def seconds(self) -> Seconds:
        """When the whole pipeline is done."""
        return max(max(stage) for stage in self.ready_s)


def play(kind: ScheduleKind, micro_batches: int, stages: Stages) -> Played:
    """Play a pipeline's schedule; replicas that cannot differ are played once."""
    if all(len(stage) == 1 for stage in stages):
        return _play_chain(kind, micro_batches, [stage[0] for stage in stages])
    classes, reduced = _merge(stages)
    if all(len(stage) == 1 for stage in reduced):
        played = _play_chain(kind, micro_batches, [stage[0] for stage in reduced])
    else:
        played = _play_net(kind, micro_batches, reduced)
    return Played(
        tuple(tuple(played.ready_s[s][c] for c in row) for s, row in enumerate(classes)),
        tuple(tuple(played.ends[s][c] for c in row) for s, row in enumerate(classes)),
    )


def _play_chain(kind: ScheduleKind, micro_batches: int, actors: Sequence[Actor]) -> Played:
    """One actor a stage, the tight loop: column 2s is stage s's forward, 2s + 1 its backward."""
    depth = len(actors)
    duration, tail, hop = _columns(actors)
    # a column of zeros stands for the batch, which is there from the start; the last stage's backward reads
    # its own forward, which its clock has passed anyway
    ends: list[list[float]] = [[0.0] * micro_batches for _ in range(2 * depth + 1)]
    free, posted = [0.0] * depth, [0.0] * depth
    for column, source, stage, m in _chain_order(kind, depth, micro_batches):
        start = ends[source][m]
        if posted[stage] > start:
            start = posted[stage]
        start += hop[column]
        if free[stage] > start:
            start = free[stage]
        posted[stage] = start
        end = ends[column][m] = start + duration[column]
        free[stage] = end + tail[column]
    return Played(tuple((f,) for f in free), tuple(((ends[2 * s], ends[2 * s + 1]),) for s in range(depth)))


def _columns(actors: Sequence[Actor]) -> tuple[list[float], list[float], list[float]]:
    duration: list[float] = []
    tail: list[float] = []
    hop: list[float] = []
    for a in actors:
        duration += (a.forward_s, a.backward_s)
        tail += (a.forward_tail_s, a.backward_tail_s)
        # alike neighbours are one actor, whose messages may still differ: the last to arrive counts
        hop += (max((h for _, h in side), default=0.0) for side in (a.from_before, a.from_behind))
    return duration, tail, hop


def _play_net(kind: ScheduleKind, micro_batches: int, stages: Stages) -> Played:
    """Several actors a stage: as the chain, with a maximum over the messages of each action."""
    depth = len(stages)
    columns: list[list[list[float]]] = [
        [[0.0] * micro_batches for _ in stages[c // 2]] for c in range(2 * depth)
    ]
    work = _net_work(stages, columns)
    free, posted = [[0.0] * len(s) for s in stages], [[0.0] * len(s) for s in stages]
    for column, _, stage, m in _chain_order(kind, depth, micro_batches):
        stage_free, stage_posted = free[stage], posted[stage]
        for r, ends, sources, duration, tail in work[column]:
            start = stage_free[r]
            post = stage_posted[r]
            for source, hop in sources:
                at = source[m]
                if post > at:
                    at = post
                at += hop
                if at > start:
                    start = at
            stage_posted[r] = start
            end = ends[m] = start + duration
            stage_free[r] = end + tail
    return Played(
        tuple(map(tuple, free)),
        tuple(tuple(zip(columns[2 * s], columns[2 * s + 1], strict=True)) for s in range(depth)),
    )


_Work = tuple[int, list[float], list[tuple[list[float], Seconds]], Seconds, Seconds]


def _net_work(stages: Stages, columns: list[list[list[float]]]) -> list[list[_Work]]:
    """For each column its replicas with the lists of ends that they wait for."""
    work: list[list[_Work]] = []
    for s, stage in enumerate(stages):
        before = columns[2 * (s - 1)] if s else []
        behind = columns[2 * (s + 1) + 1] if s + 1 < len(stages) else []
        forward: list[_Work] = []
        backward: list[_Work] = []
        for r, a in enumerate(stage):
            waits = [(before[j], hop) for j, hop in a.from_before]
            forward.append((r, columns[2 * s][r], waits, a.forward_s, a.forward_tail_s))
            waits = [(behind[j], hop) for j, hop in a.from_behind]
            backward.append((r, columns[2 * s + 1][r], waits, a.backward_s, a.backward_tail_s))
        work += (forward, backward)
    return work


@lru_cache(maxsize=512)
def _chain_order(kind: ScheduleKind, depth: int, micro_batches: int) -> tuple[tuple[int, int, int, int], ...]:
    """Every action as (column, column it reads, stage, micro-batch), each behind all that it waits for."""
    queues = [stage_actions(kind, s, depth, micro_batches) for s in range(depth)]
    at = [0] * depth
    done: set[tuple[int, int]] = set()
    order: list[tuple[int, int, int, int]] = []
    while len(order) < 2 * depth * micro_batches:
        for s, queue in enumerate(queues):
            while at[s] < len(queue):
                action = queue[at[s]]
                column, source = _column_and_source(s, depth, action.work)
                if source < 2 * depth and (source, action.micro_batch) not in done:
                    break
                done.add((column, action.micro_batch))
                order.append((column, source, s, action.micro_batch))
                at[s] += 1
    return tuple(order)


def _column_and_source(stage: int, depth: int, work: Work) -> tuple[int, int]:
    if work is Work.FORWARD:
        return 2 * stage, 2 * (stage - 1) if stage else 2 * depth
    return 2 * stage + 1, 2 * (stage + 1) + 1 if stage + 1 < depth else 2 * stage


def _merge(stages: Stages) -> tuple[list[list[int]], Stages]:
    """Group replicas of a stage that must run in step: equal costs, equal messages from equal groups.

    A clock is a function of the set of (clock waited for, seconds), so equal sets mean equal clocks.
    """
    colours = [_number([_costs(a) for a in stage]) for stage in stages]
    while True:
        finer = [
            _number([(colours[s][r], *_waits(a, s, colours)) for r, a in enumerate(stage)])
            for s, stage in enumerate(stages)
        ]
        if finer == colours:
            break
        colours = finer
    first = [[row.index(c) for c in range(max(row) + 1)] for row in colours]
    merged = tuple(
        tuple(_recoloured(stage[r], s, colours) for r in first[s]) for s, stage in enumerate(stages)
    )
    return colours, merged


def _costs(a: Actor) -> tuple[Seconds, ...]:
    return a.forward_s, a.backward_s, a.forward_tail_s, a.backward_tail_s


def _waits(a: Actor, stage: int, colours: list[list[int]]) -> tuple[Sources, Sources]:
    before = {(colours[stage - 1][j], hop) for j, hop in a.from_before}
    behind = {(colours[stage + 1][j], hop) for j, hop in a.from_behind}
    return tuple(sorted(before)), tuple(sorted(behind))


def _recoloured(a: Actor, stage: int, colours: list[list[int]]) -> Actor:
    before, behind = _waits(a, stage, colours)
    return Actor(a.forward_s, a.backward_s, before, behind, a.forward_tail_s, a.backward_tail_s)


def _number(keys: Sequence[object]) -> list[int]:
    seen: dict[object, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]
