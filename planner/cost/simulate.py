"""Event simulation of one pipeline's schedule: every replica its own clock, messages between their overlaps.

Rules (the engine's): an action starts when the one before it is done and its inputs are there; the receive of
an action is posted when the action before it starts, so a message lands one hop after that at the earliest; a
message leaves when its action ends. All are maxima of sums: no longer duration ever makes anything earlier.

A row is what one set of devices does: a stage; interleaved, several stages that share one clock. Every stage
has three columns of ends: forwards, backwards (split: gradients of inputs) and gradients of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import Work, row_actions
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
    weight_s: Seconds = 0.0
    """Of the backward: the gradient of the weights, which a zero-bubble schedule computes later."""

    def seconds(self, work: Work) -> Seconds:
        """Of one action."""
        if work is Work.FORWARD:
            return self.forward_s
        if work is Work.WEIGHT:
            return self.weight_s
        return self.backward_s - self.weight_s if work is Work.INPUT else self.backward_s


Stages = tuple[tuple[Actor, ...], ...]


COLUMN = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.INPUT: 1, Work.WEIGHT: 2}
"""Where an action's end stands among the three of its stage and micro-batch."""
WORKS = 3

Ends = tuple[list[Seconds], ...]
"""By column and micro-batch; the third column is zeros where backwards are whole."""


@dataclass(frozen=True, slots=True)
class Played:
    """When every replica is done, by stage and replica, and when each action ended."""

    ready_s: tuple[tuple[Seconds, ...], ...]
    """When its devices are done with all their stages."""
    ends: tuple[tuple[Ends, ...], ...]
    """By stage and replica."""

    @property
    def seconds(self) -> Seconds:
        """When the whole pipeline is done."""
        return max(max(stage) for stage in self.ready_s)


def play(kind: ScheduleKind, micro_batches: int, stages: Stages, num_rows: int | None = None) -> Played:
    """Play a pipeline's schedule; replicas that cannot differ are played once.

    ``num_rows``: sets of devices, if fewer than stages (interleaved): stage s runs on set ``s % num_rows``.
    """
    rows = len(stages) if num_rows is None else num_rows
    if all(len(stage) == 1 for stage in stages):
        return _play_chain(kind, micro_batches, [stage[0] for stage in stages], rows)
    classes, reduced = _merge(stages, rows)
    if all(len(stage) == 1 for stage in reduced):
        played = _play_chain(kind, micro_batches, [stage[0] for stage in reduced], rows)
    else:
        played = _play_net(kind, micro_batches, reduced, rows)
    return Played(
        tuple(tuple(played.ready_s[s][c] for c in classes[s % rows]) for s in range(len(stages))),
        tuple(tuple(played.ends[s][c] for c in classes[s % rows]) for s in range(len(stages))),
    )


def _play_chain(kind: ScheduleKind, micro_batches: int, actors: Sequence[Actor], rows: int) -> Played:
    """One actor a stage, the tight loop over columns of ends."""
    depth = len(actors)
    duration, tail, hop = _columns(kind, actors)
    # a column of zeros stands for what is there from the start: the batch, and what the row itself has done
    ends: list[list[float]] = [[0.0] * micro_batches for _ in range(WORKS * depth + 1)]
    free, posted = [0.0] * rows, [0.0] * rows
    for column, source, row, m in _chain_order(kind, rows, depth, micro_batches):
        start = ends[source][m]
        if posted[row] > start:
            start = posted[row]
        start += hop[column]
        if free[row] > start:
            start = free[row]
        posted[row] = start
        end = ends[column][m] = start + duration[column]
        free[row] = end + tail[column]
    return Played(
        tuple((free[s % rows],) for s in range(depth)),
        tuple((tuple(ends[WORKS * s : WORKS * (s + 1)]),) for s in range(depth)),
    )


def _columns(kind: ScheduleKind, actors: Sequence[Actor]) -> tuple[list[float], list[float], list[float]]:
    duration: list[float] = []
    tail: list[float] = []
    hop: list[float] = []
    for a in actors:
        duration += (a.seconds(work) for work in _works(kind))
        tail += (a.forward_tail_s, a.backward_tail_s, 0.0)
        # alike neighbours are one actor, whose messages may still differ: the last to arrive counts
        hop += (max((h for _, h in side), default=0.0) for side in (a.from_before, a.from_behind, ()))
    return duration, tail, hop


def _works(kind: ScheduleKind) -> tuple[Work, Work, Work]:
    """What stands in the three columns of a stage."""
    split = kind is ScheduleKind.ZERO_BUBBLE
    return Work.FORWARD, Work.INPUT if split else Work.BACKWARD, Work.WEIGHT


def _play_net(kind: ScheduleKind, micro_batches: int, stages: Stages, rows: int) -> Played:
    """Several actors a stage: as the chain, with a maximum over the messages of each action."""
    depth = len(stages)
    columns: list[list[list[float]]] = [
        [[0.0] * micro_batches for _ in stages[c // WORKS]] for c in range(WORKS * depth)
    ]
    work = _net_work(kind, stages, columns)
    free, posted = ([[0.0] * len(stages[row]) for row in range(rows)] for _ in range(2))
    for column, _, row, m in _chain_order(kind, rows, depth, micro_batches):
        row_free, row_posted = free[row], posted[row]
        for r, ends, sources, duration, tail in work[column]:
            start = row_free[r]
            post = row_posted[r]
            for source, hop in sources:
                at = source[m]
                if post > at:
                    at = post
                at += hop
                if at > start:
                    start = at
            row_posted[r] = start
            end = ends[m] = start + duration
            row_free[r] = end + tail
    return Played(
        tuple(tuple(free[s % rows]) for s in range(depth)),
        tuple(tuple(zip(*columns[WORKS * s : WORKS * (s + 1)], strict=True)) for s in range(depth)),
    )


_Work = tuple[int, list[float], list[tuple[list[float], Seconds]], Seconds, Seconds]


def _net_work(kind: ScheduleKind, stages: Stages, columns: list[list[list[float]]]) -> list[list[_Work]]:
    """For each column its replicas with the lists of ends that they wait for."""
    found: list[list[_Work]] = []
    works = _works(kind)
    for s, stage in enumerate(stages):
        before = columns[WORKS * (s - 1)] if s else []
        behind = columns[WORKS * (s + 1) + 1] if s + 1 < len(stages) else []
        for c, work in enumerate(works):
            column = []
            for r, a in enumerate(stage):
                waits = [(before[j], hop) for j, hop in a.from_before] if c == 0 else []
                if c == 1:
                    waits = [(behind[j], hop) for j, hop in a.from_behind]
                tail = (a.forward_tail_s, a.backward_tail_s, 0.0)[c]
                column.append((r, columns[WORKS * s + c][r], waits, a.seconds(work), tail))
            found.append(column)
    return found


@lru_cache(maxsize=512)
def _chain_order(
    kind: ScheduleKind, rows: int, depth: int, micro_batches: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Every action as (column, column it reads, row, micro-batch), each behind all that it waits for."""
    queues = [row_actions(kind, row, rows, depth, micro_batches) for row in range(rows)]
    places = [{work: _column_and_source(stage, depth, work) for work in COLUMN} for stage in range(depth)]
    ended = [[False] * micro_batches for _ in range(WORKS * depth)]
    ended.append([True] * micro_batches)  # what is there from the start
    at, number = [0] * rows, sum(map(len, queues))
    order: list[tuple[int, int, int, int]] = []
    while len(order) < number:
        for row, queue in enumerate(queues):
            while at[row] < len(queue):
                action = queue[at[row]]
                m = action.micro_batch
                column, source = places[action.stage][action.work]
                if not ended[source][m]:
                    break
                ended[column][m] = True
                order.append((column, source, row, m))
                at[row] += 1
    return tuple(order)


def _column_and_source(stage: int, depth: int, work: Work) -> tuple[int, int]:
    """What a row's own clock has passed anyway (its forward, its input's gradient) is no source."""
    column = WORKS * stage + COLUMN[work]
    if work is Work.FORWARD and stage > 0:
        return column, column - WORKS
    if work in (Work.BACKWARD, Work.INPUT) and stage + 1 < depth:
        return column, column + WORKS
    return column, WORKS * depth


def _merge(stages: Stages, rows: int) -> tuple[list[list[int]], Stages]:
    """Group replicas of a row that must run in step: equal costs, equal messages from equal groups.

    A clock is a function of the set of (clock waited for, seconds), so equal sets mean equal clocks.
    """
    of_row = [range(row, len(stages), rows) for row in range(rows)]
    width = [len(stages[row]) for row in range(rows)]
    colours = [
        _number([tuple(_costs(stages[s][r]) for s in of_row[row]) for r in range(width[row])])
        for row in range(rows)
    ]
    while True:
        finer = [
            _number(
                [
                    (colours[row][r], *(_waits(stages[s][r], s, colours) for s in of_row[row]))
                    for r in range(width[row])
                ]
            )
            for row in range(rows)
        ]
        if finer == colours:
            break
        colours = finer
    first = [[row.index(c) for c in range(max(row) + 1)] for row in colours]
    merged = tuple(
        tuple(_recoloured(stage[r], s, colours) for r in first[s % rows]) for s, stage in enumerate(stages)
    )
    return colours, merged


def _costs(a: Actor) -> tuple[Seconds, ...]:
    return a.forward_s, a.backward_s, a.forward_tail_s, a.backward_tail_s, a.weight_s


def _waits(a: Actor, stage: int, colours: list[list[int]]) -> tuple[Sources, Sources]:
    rows = len(colours)
    before = {(colours[(stage - 1) % rows][j], hop) for j, hop in a.from_before}
    behind = {(colours[(stage + 1) % rows][j], hop) for j, hop in a.from_behind}
    return tuple(sorted(before)), tuple(sorted(behind))


def _recoloured(a: Actor, stage: int, colours: list[list[int]]) -> Actor:
    before, behind = _waits(a, stage, colours)
    return replace(a, from_before=before, from_behind=behind)


def _number(keys: Sequence[object]) -> list[int]:
    seen: dict[object, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]
