"""The one total order of communication of a step, equal on every rank; pure arithmetic on the plan.

Communications are sorted by the time they are ready in one deterministic simulation (a forward takes one
unit, a backward two, a message none). Whatever a communication needs was ready strictly before it, so the
order is topological: if every rank issues its share in this order, the lowest unfinished communication can
always run, even where a device executes one at a time, blocking.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import TypeAlias

from ..units import Bytes
from .placement import places
from .plan import Pipeline, Plan
from .rows import micro_batch_rows, overlaps, replica_rows
from .schedule import Action, Work, stage_actions
from .segments import segments

REDUCTION_BYTES: Bytes = 8 * 2**20
"""A sum of gradients is closed at this size, so that it runs while the blocks below are still computed."""
_UNITS = {Work.FORWARD: 1, Work.BACKWARD: 2}
"""A backward computes two products for each one of the forward."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows that one rank hands to another: outputs after a forward, gradients after a backward."""

    pipeline: int
    source: Action
    """The action whose result is sent."""
    target: Action
    """The action that needs it, on a neighbour stage."""
    sender: int
    receiver: int
    rows: range
    """Rows of the global batch."""

    @property
    def members(self) -> tuple[int, ...]:
        """The two ranks."""
        return (self.sender, self.receiver)


@dataclass(frozen=True, slots=True)
class Reduction:
    """One sum of gradients over all ranks that hold some blocks, or one tied parameter."""

    blocks: tuple[int, ...]
    """Ascending; for a tied parameter the blocks that share it."""
    tie: str | None
    """Name of the tied parameter; None: all parameters of ``blocks`` that are not tied."""
    members: tuple[int, ...]
    """Ranks, ascending."""

    @property
    def name(self) -> str:
        """``7:26``, or the name of the tied parameter."""
        return self.tie or f"{self.blocks[0]}:{self.blocks[-1] + 1}"


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit word: the last communication of a step, over all ranks."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """What the order must know of a model's gradients; equal on every rank."""

    ties: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Blocks that share a parameter, by the name of the tie."""
    block_bytes: Sequence[Bytes] = ()
    """Bytes of gradients of each block, without tied ones; empty: a segment is summed at once."""


Communication: TypeAlias = Transfer | Reduction | Commit
_Times: TypeAlias = Mapping[tuple[int, Action], int]
"""When each (pipeline, action) ends."""


def communications(plan: Plan, num_rows: int, summed: Summed) -> tuple[Communication, ...]:
    """Every communication of a step on a batch of ``num_rows`` rows, in the total order."""
    ends = end_times(plan)
    ranks = range(len(plan.devices))
    hops = [(ends[t.pipeline, t.source], t) for t in transfers(plan, num_rows)]
    sums = [(_ready(plan, r, ends), r) for r in reductions(plan, summed) if len(r.members) > 1]
    hops.sort(key=lambda item: (item[0], item[1].sender, item[1].receiver))
    sums.sort(key=lambda item: (item[0], [-block for block in reversed(item[1].blocks)], item[1].name))
    ordered: list[tuple[Fraction | int, int, Communication]] = [(time, 0, hop) for time, hop in hops]
    ordered += [(time, 1, reduction) for time, reduction in sums]
    ordered.sort(key=lambda item: item[:2])
    return (*(item for _, _, item in ordered), Commit(tuple(ranks)))


def share_of(rank: int, order: Iterable[Communication]) -> tuple[Communication, ...]:
    """The communications that ``rank`` takes part in, in order."""
    return tuple(item for item in order if rank in item.members)


def transfers(plan: Plan, num_rows: int) -> Iterator[Transfer]:
    """All messages between stages, by pipeline, micro-batch and boundary; no order between them is meant."""
    ranks = ranks_of_stages(plan)
    for p, (pipeline, spans) in enumerate(zip(plan.pipelines, micro_batch_rows(plan, num_rows), strict=True)):
        for m, rows in enumerate(spans):
            for before in range(len(pipeline.stages) - 1):
                yield from _hops(p, pipeline, before, m, rows, ranks)


def _hops(
    p: int,
    pipeline: Pipeline,
    before: int,
    m: int,
    rows: range,
    ranks: Mapping[tuple[int, int], Sequence[int]],
) -> Iterator[Transfer]:
    """Forward over the boundary behind stage ``before``, and backward over the same rows."""
    after = before + 1
    sides = [replica_rows(pipeline.stages[s], rows) for s in (before, after)]
    down = Action(before, Work.FORWARD, m), Action(after, Work.FORWARD, m)
    up = Action(after, Work.BACKWARD, m), Action(before, Work.BACKWARD, m)
    for overlap in overlaps(*sides):
        a, b = ranks[p, before][overlap.sender], ranks[p, after][overlap.receiver]
        yield Transfer(p, *down, a, b, overlap.rows)
        yield Transfer(p, *up, b, a, overlap.rows)


def reductions(plan: Plan, summed: Summed) -> tuple[Reduction, ...]:
    """All sums of gradients, those with a single member too: parts of segments, and each tied parameter."""
    ranks = ranks_of_stages(plan)
    found = [
        Reduction(tuple(blocks), None, _members(ranks[holder] for holder in segment.holders))
        for segment in segments(plan)
        for blocks in _parts(segment.blocks, summed.block_bytes)
    ]
    for name, blocks in sorted(summed.ties.items()):
        holders = {holder for s in segments(plan) if set(s.blocks) & set(blocks) for holder in s.holders}
        found.append(Reduction(tuple(sorted(blocks)), name, _members(ranks[h] for h in sorted(holders))))
    return tuple(found)


def _parts(blocks: range, block_bytes: Sequence[Bytes]) -> Iterator[range]:
    """Runs of blocks of at least REDUCTION_BYTES, from the last block down."""
    stop, size = blocks.stop, 0
    for block in reversed(blocks):
        size += block_bytes[block] if block_bytes else 0
        if size >= REDUCTION_BYTES or block == blocks.start:
            yield range(block, stop)
            stop, size = block, 0


def ranks_of_stages(plan: Plan) -> dict[tuple[int, int], tuple[int, ...]]:
    """The first rank of each replica of a (pipeline, stage), by replica."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for place in places(plan):
        if place.tp_rank == 0:
            found.setdefault((place.pipeline, place.stage), {})[place.replica] = place.rank
    return {stage: tuple(ranks[r] for r in sorted(ranks)) for stage, ranks in found.items()}


def end_times(plan: Plan) -> dict[tuple[int, Action], int]:
    """When each action of each pipeline ends, in the units of the simulation."""
    return {
        (p, action): time
        for p, pipeline in enumerate(plan.pipelines)
        for action, time in _simulate(plan, pipeline).items()
    }


def _simulate(plan: Plan, pipeline: Pipeline) -> dict[Action, int]:
    depth = len(pipeline.stages)
    waiting = [
        list(reversed(stage_actions(plan.schedule, s, depth, pipeline.micro_batches))) for s in range(depth)
    ]
    clock, ends = [0] * depth, dict[Action, int]()
    while any(waiting):
        before = len(ends)
        for s in range(depth):
            while waiting[s] and (start := _start(waiting[s][-1], depth, ends)) is not None:
                action = waiting[s].pop()
                clock[s] = ends[action] = max(clock[s], start) + _UNITS[action.work]
        assert len(ends) > before, f"schedule {plan.schedule} waits for an action that nobody plays"
    return ends


def _start(action: Action, depth: int, ends: Mapping[Action, int]) -> int | None:
    """When the input of an action is there; None: not yet known."""
    source = needs(action, depth)
    return 0 if source is None else ends.get(source)


def needs(action: Action, depth: int) -> Action | None:
    """The action of a neighbour stage whose result ``action`` needs, in a pipeline of ``depth`` stages."""
    forward = action.work is Work.FORWARD
    neighbour = action.stage - 1 if forward else action.stage + 1
    return Action(neighbour, action.work, action.micro_batch) if 0 <= neighbour < depth else None


def _ready(plan: Plan, reduction: Reduction, ends: _Times) -> Fraction:
    """When the last holder's last backward, which goes down block by block, has passed the blocks."""
    return max(
        ends[p, Action(s, Work.BACKWARD, pipeline.micro_batches - 1)]
        - _UNITS[Work.BACKWARD] * Fraction(lowest - stage.blocks.start, len(stage.blocks))
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if (lowest := min((b for b in reduction.blocks if b in stage.blocks), default=None)) is not None
    )


def _members(ranks: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted(set(chain.from_iterable(ranks))))
