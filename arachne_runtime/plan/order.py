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
from .plan import Pipeline, Plan, Stage
from .rows import guest_row, has_guests, micro_batch_rows, overlaps, replica_rows
from .schedule import Action, Work, first_backward, last_work, row_actions
from .schedule import num_rows as rows_of
from .segments import segments
from .shards import Atom, Holder, ParameterForm, atoms, holders
from .zero import splits_gradients

REDUCTION_BYTES: Bytes = 8 * 2**20
"""A sum of gradients is closed at this size, so that it runs while the blocks below are still computed."""
_UNITS = {Work.FORWARD: 1, Work.BACKWARD: 2, Work.INPUT: 1, Work.WEIGHT: 1}
"""A backward computes two products for each one of the forward; its halves compute one each."""


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
    """One sum of gradients over the ranks that hold the same parts of some blocks, or of a tied parameter."""

    blocks: tuple[int, ...]
    """Ascending; for a tied parameter the blocks that share it."""
    tie: str | None
    """Name of the tied parameter; None: parameters of ``blocks`` that are not tied."""
    members: tuple[int, ...]
    """Ranks, ascending."""
    index: int = 0
    """Among those of the same blocks, which have other members where ranks hold different shards."""
    atoms: tuple[tuple[ParameterForm, Atom], ...] = field(default=(), compare=False, repr=False)
    """The parts that are summed, blocks and their parameters in descending order."""

    @property
    def name(self) -> str:
        """``7:26``, or the name of the tied parameter; ``7:26.1`` is the second of the same blocks."""
        name = self.tie or f"{self.blocks[0]}:{self.blocks[-1] + 1}"
        return f"{name}.{self.index}" if self.index else name


@dataclass(frozen=True, slots=True)
class Inside:
    """The exchanges inside an action of ranks that compute it together, down to one block.

    The ranks themselves issue them where they compute; here they say what must go before and what after.
    """

    pipeline: int
    action: Action
    block: int
    """The lowest whose exchanges these are: sums of gradients may come between those of the last backward."""
    members: tuple[int, ...]


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
    forms: Sequence[Sequence[ParameterForm]] = ()
    """Parameters of each block, tied ones in each of theirs; empty: one that no rank has only a part of."""

    @classmethod
    def of(cls, forms: Sequence[Sequence[ParameterForm]]) -> "Summed":
        """From the parameters of each block."""
        ties: dict[str, list[int]] = {}
        for index, block in enumerate(forms):
            for form in block:
                if form.tie is not None:
                    ties.setdefault(form.tie, []).append(index)
        sizes = tuple(sum(f.nbytes for f in block if f.requires_grad and not f.tie) for block in forms)
        return cls(ties, sizes, forms)

    def of_blocks(self, blocks: Iterable[int], tie: str | None) -> Iterator[ParameterForm]:
        """Trainable parameters of some blocks that are not tied; or the one of the tie."""
        if not self.forms:
            yield ParameterForm("", (), 0, tie=tie)
            return
        found = [f for b in blocks for f in reversed(self.forms[b]) if f.requires_grad and f.tie == tie]
        yield from found if tie is None else found[:1]


Communication: TypeAlias = Transfer | Reduction | Inside | Commit
_Times: TypeAlias = Mapping[tuple[int, Action], int]
"""When each (pipeline, action) ends."""


def communications(plan: Plan, num_rows: int, summed: Summed) -> tuple[Communication, ...]:
    """Every communication of a step on a batch of ``num_rows`` rows, in the total order."""
    ends = end_times(plan)
    ranks = range(len(plan.devices))
    hops = [(ends[t.pipeline, t.source], t) for t in transfers(plan, num_rows)]
    sums = [(_ready(plan, r, ends), r) for r in reductions(plan, summed) if len(r.members) > 1]
    inner = list(_inside(plan, num_rows, [r for _, r in sums], ends))
    hops.sort(key=lambda item: (item[0], item[1].sender, item[1].receiver))
    sums.sort(
        key=lambda item: (
            item[0],
            [-block for block in reversed(item[1].blocks)],
            item[1].tie or "",
            item[1].index,
        )
    )
    ordered: list[tuple[Fraction | int, int, Communication]] = [(time, 0, each) for time, each in inner]
    ordered += [(time, 1, hop) for time, hop in hops]
    ordered += [(time, 2, reduction) for time, reduction in sums]
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
                yield from _hops(plan, p, before, m, rows, ranks)


def _hops(
    plan: Plan,
    p: int,
    before: int,
    m: int,
    rows: range,
    ranks: Mapping[tuple[int, int], Sequence[Sequence[int]]],
) -> Iterator[Transfer]:
    """Forward over the boundary behind stage ``before``, and backward over the same rows.

    None where the same ranks hold both stages, as where an interleaved pipeline has one set of devices.
    """
    after, pipeline = before + 1, plan.pipelines[p]
    sides = [replica_rows(pipeline.stages[s], rows) for s in (before, after)]
    down = Action(before, Work.FORWARD, m), Action(after, Work.FORWARD, m)
    back = first_backward(plan.schedule)
    up = Action(after, back, m), Action(before, back, m)
    for overlap in overlaps(*sides):
        above, below = ranks[p, before][overlap.sender], ranks[p, after][overlap.receiver]
        if above == below:
            continue
        for sender, receiver in _pairs(above, below):
            yield Transfer(p, *down, sender, receiver, overlap.rows)
        for sender, receiver in _pairs(below, above):
            yield Transfer(p, *up, sender, receiver, overlap.rows)
    if has_guests(plan, pipeline, pipeline.stages[after]):
        for above, below in _to_guests(ranks[p, before], ranks[p, after], sides, guest_row(rows)):
            yield from (Transfer(p, *down, *pair, guest_row(rows)) for pair in _pairs(above, below))


def _to_guests(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    sides: Sequence[Sequence[range]],
    guest: range,
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Ranks that hold the ``guest`` row, and those of a replica that has no row of its own; no way back."""
    holders = [ranks for ranks, mine in zip(before, sides[0], strict=True) if guest and guest[0] in mine]
    for below, mine in zip(after, sides[1], strict=True):
        yield from ((above, below) for above in holders if not mine and above != below)


def _pairs(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each tensor-parallel rank of a receiver gets all rows, which all of a sender have, once."""
    for k, receiver in enumerate(receivers):
        yield senders[k % len(senders)], receiver


def _inside(
    plan: Plan, num_rows: int, sums: Iterable[Reduction], ends: "_Times"
) -> Iterator[tuple[Fraction | int, Inside]]:
    """The exchanges of ranks that compute together, each with the time when it has ended."""
    ranks = ranks_of_stages(plan)
    starts = {reduction.blocks[0] for reduction in sums if reduction.tie is None}
    for p, spans in enumerate(micro_batch_rows(plan, num_rows)):
        for s, stage in enumerate(plan.pipelines[p].stages):
            pieces = sorted({stage.blocks.start, *starts.intersection(stage.blocks)}, reverse=True)
            together = has_guests(plan, plan.pipelines[p], stage)
            for members, used in _together(stage, ranks[p, s], spans, together):
                for m in used:
                    for work in (Work.FORWARD, first_backward(plan.schedule)):
                        action, whole = Action(s, work, m), (stage.blocks.start,)
                        cut = work is Work.BACKWARD and m == used[-1]
                        for block in pieces if cut else whole:
                            time = ends[p, action] - _UNITS[work] * _part_below(stage, block)
                            yield time, Inside(p, action, block, members)


def _together(
    stage: Stage, ranks: Sequence[Sequence[int]], spans: Sequence[range], together: bool
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Ranks of a stage that compute together, and the micro-batches that they play."""
    if together:
        yield tuple(sorted(chain(*ranks))), [m for m, rows in enumerate(spans) if rows]
        return
    parts = [replica_rows(stage, rows) for rows in spans]
    for replica, members in enumerate(ranks):
        if len(members) > 1:
            yield tuple(sorted(members)), [m for m, mine in enumerate(parts) if mine[replica]]


def _part_below(stage: Stage, block: int) -> Fraction:
    """Of a stage's work, what lies below a block."""
    return Fraction(block - stage.blocks.start, len(stage.blocks))


def reductions(plan: Plan, summed: Summed) -> tuple[Reduction, ...]:
    """All sums of gradients, those with a single member too: parts of segments, and each tied parameter.

    There are none where a stage splits its gradients: DeepSpeed sums them within each backward.
    """
    if any(splits_gradients(stage) for pipeline in plan.pipelines for stage in pipeline.stages):
        return ()
    found: list[Reduction] = []
    for segment in segments(plan):
        for blocks in _parts(segment.blocks, summed.block_bytes):
            found += _by_members(plan, tuple(blocks), None, summed)
    for name, sharing in sorted(summed.ties.items()):
        found += _by_members(plan, tuple(sorted(sharing)), name, summed)
    return tuple(found)


def _by_members(plan: Plan, blocks: tuple[int, ...], tie: str | None, summed: Summed) -> Iterator[Reduction]:
    """One sum for each set of ranks that hold the same atoms."""
    by_members: dict[tuple[int, ...], list[tuple[ParameterForm, Atom]]] = {}
    held_by: dict[bool, tuple[Holder, ...]] = {}
    for form in summed.of_blocks(reversed(blocks), tie):
        if form.is_of_experts not in held_by:
            held_by[form.is_of_experts] = holders(plan, form, blocks)
        for atom in atoms(form, held_by[form.is_of_experts]):
            by_members.setdefault(atom.members, []).append((form, atom))
    for index, (members, parts) in enumerate(sorted(by_members.items(), key=lambda item: item[0])):
        yield Reduction(blocks, tie, members, index, tuple(parts))


def sum_starts(plan: Plan, block_bytes: Sequence[Bytes]) -> frozenset[int]:
    """First blocks of the runs that are summed, over all ranks; ``block_bytes`` as in ``Summed``."""
    if any(splits_gradients(stage) for pipeline in plan.pipelines for stage in pipeline.stages):
        return frozenset()
    runs = (run for segment in segments(plan) for run in _parts(segment.blocks, block_bytes))
    return frozenset(run.start for run in runs)


def _parts(blocks: range, block_bytes: Sequence[Bytes]) -> Iterator[range]:
    """Runs of blocks of at least REDUCTION_BYTES, from the last block down."""
    stop, size = blocks.stop, 0
    for block in reversed(blocks):
        size += block_bytes[block] if block_bytes else 0
        if size >= REDUCTION_BYTES or block == blocks.start:
            yield range(block, stop)
            stop, size = block, 0


def ranks_of_stages(plan: Plan) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
    """The ranks of each replica of a (pipeline, stage), by replica and tensor-parallel rank."""
    rank_of = {place.device: place.rank for place in places(plan)}
    return {
        (p, s): tuple(tuple(rank_of[device] for device in replica.devices) for replica in stage.replicas)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    }


def end_times(plan: Plan) -> dict[tuple[int, Action], int]:
    """When each action of each pipeline ends, in the units of the simulation."""
    return {
        (p, action): time
        for p, pipeline in enumerate(plan.pipelines)
        for action, time in _simulate(plan, pipeline).items()
    }


def _simulate(plan: Plan, pipeline: Pipeline) -> dict[Action, int]:
    depth, rows = len(pipeline.stages), rows_of(plan.schedule, pipeline)
    waiting = [
        list(reversed(row_actions(plan.schedule, r, rows, depth, pipeline.micro_batches)))
        for r in range(rows)
    ]
    clock, ends = [0] * rows, dict[Action, int]()
    while any(waiting):
        before = len(ends)
        for r in range(rows):
            while waiting[r] and (start := _start(waiting[r][-1], depth, ends)) is not None:
                action = waiting[r].pop()
                clock[r] = ends[action] = max(clock[r], start) + _UNITS[action.work]
        assert len(ends) > before, f"schedule {plan.schedule} waits for an action that nobody plays"
    return ends


def _start(action: Action, depth: int, ends: Mapping[Action, int]) -> int | None:
    """When the input of an action is there; None: not yet known."""
    source = needs(action, depth)
    return 0 if source is None else ends.get(source)


def needs(action: Action, depth: int) -> Action | None:
    """The action of a neighbour stage whose result ``action`` needs, in a pipeline of ``depth`` stages."""
    if action.work is Work.WEIGHT:
        return None
    forward = action.work is Work.FORWARD
    neighbour = action.stage - 1 if forward else action.stage + 1
    return Action(neighbour, action.work, action.micro_batch) if 0 <= neighbour < depth else None


def _ready(plan: Plan, reduction: Reduction, ends: _Times) -> Fraction:
    """When the last holder's last backward, which goes down block by block, has passed the blocks.

    Where backwards are split: its last gradients of weights.
    """
    work = last_work(plan.schedule)
    return max(
        ends[p, Action(s, work, pipeline.micro_batches - 1)] - _UNITS[work] * _part_below(stage, lowest)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if (lowest := min((b for b in reduction.blocks if b in stage.blocks), default=None)) is not None
    )
