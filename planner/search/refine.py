"""Local moves on a plan: every neighbour that differs by one decision; a bounded hill climb over prices."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from msgspec.structs import replace

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.rules.plan import interleaved_stages_take_turns
from arachne_runtime.plan.schedule import num_rows

from ..cost.experts import expert_tilings
from ..request import Request
from .complete import Completer
from .judge import Judge
from .place import PipelineSeats, Placement, StageSeats
from .score import Score

LEAST_GAIN = 1e-9
"""Relative gain below which two plans count as equally fast."""


class Refiner:
    """Climbs from a plan to a better one until no move helps or the judge's budget ends."""

    def __init__(self, judge: Judge, completer: Completer, seed: int, *, structural: bool = True) -> None:
        self.structural = structural
        """Whether devices move; else only numbers change."""
        self.judge = judge
        self.completer = completer
        self.random = random.Random(seed)

    def climb(self, plan: Plan, most_evaluations: int) -> Plan:
        """First improvement, over cheap moves before structural ones, within so many evaluations."""
        end = self.judge.evaluations + most_evaluations
        best = self.judge.price(plan)
        while self.judge.evaluations < end:
            better = self._better(plan, best, end)
            if better is None:
                return plan
            plan, best = better
        return plan

    def _better(self, plan: Plan, best: Score, end: int) -> tuple[Plan, Score] | None:
        for neighbour in self.neighbours(plan):
            if self.judge.evaluations >= end:
                return None
            score = self.judge.price(neighbour)
            if (score.excess, score.value) < (best.excess, best.value * (1 - LEAST_GAIN)):
                return neighbour, score
        return None

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Every plan that one move makes, cheap moves first, structural ones in a seeded order.

        Where devices stand in several stages their numbers change only as far as all of these stay alike.
        """
        numbers = number_moves(plan, self._kind_of)
        yield from (moved for moved in numbers if not any(interleaved_stages_take_turns(moved)))
        yield from option_moves(plan, self.completer.request)
        in_turns = any(num_rows(plan.schedule, p) < len(p.stages) for p in plan.pipelines)
        if in_turns or not self.structural:
            return
        sizes = list(self._size_moves(plan))
        yield from sizes
        placements = list(placement_moves(plan, self.completer.request.cluster.devices))
        self.random.shuffle(placements)
        for placement, keep in placements:
            for hint in (keep, None):
                if found := self.completer.plan(placement, hint):
                    yield found

    def _kind_of(self, replica: Replica) -> object:
        fleet = self.completer.request.fleet
        return fleet.node(node_of(replica.devices[0])).device.name, len(replica.devices)

    def _size_moves(self, plan: Plan) -> Iterator[Plan]:
        """Another micro-batch for all pipelines, or for one kind of pipeline."""
        placement = placement_of(plan)
        sizes = [p.micro_batch for p in plan.pipelines]
        lines = [self.completer.line(seats) for seats in placement.pipelines]
        for line in dict.fromkeys(lines):
            for size in self.completer.micro_batches(line):
                changed = [size if own == line else b for own, b in zip(lines, sizes, strict=True)]
                if changed != sizes and (found := self.completer.plan(placement, changed)):
                    yield found


def placement_of(plan: Plan) -> Placement:
    """The devices of a plan, without its numbers."""
    return Placement(
        tuple(tuple(tuple(r.devices for r in stage.replicas) for stage in p.stages) for p in plan.pipelines)
    )


def number_moves(plan: Plan, kind_of: Callable[[Replica], object] | None = None) -> Iterator[Plan]:
    """Moves that leave every device where it is: blocks, shares, recomputation, micro-batches.

    Of replicas of one kind and share only two change their shares; without ``kind_of`` none are alike.
    """
    groups = _of_one_cut(plan)
    for group in groups:
        for members in [group] if len(group) == 1 else [group, group[:1]]:
            for pipeline in _pipeline_moves(plan.pipelines[members[0]], kind_of):
                yield _with(plan, {p: _renumbered(plan.pipelines[p], pipeline) for p in members})
    yield from _count_moves(plan, [group[0] for group in groups], [group[-1] for group in groups])


def option_moves(plan: Plan, request: Request) -> Iterator[Plan]:
    """Another ZeRO stage or tiling of experts of a stage, in all pipelines like it."""
    experts = max(block.experts for block in request.model.blocks)
    for group in _of_one_cut(plan):
        first = plan.pipelines[group[0]]
        for s, stage in enumerate(first.stages):
            for changed in _options(stage, experts, request.max_zero):
                moved = {p: _with_options(plan.pipelines[p], s, changed) for p in group}
                if all(_may_tile(pipeline.stages[s], experts) for pipeline in moved.values()):
                    yield _with(plan, moved)


def _options(stage: Stage, experts: int, max_zero: int) -> Iterator[Stage]:
    for zero in range(max_zero + 1):
        if zero != stage.zero:
            yield replace(stage, zero=zero)
    if experts:
        for parallel, tensor in expert_tilings([node_of(device) for device in stage.devices], experts):
            if (parallel, tensor) != (stage.expert_parallel, stage.expert_tensor):
                yield replace(stage, expert_parallel=parallel, expert_tensor=tensor)


def _may_tile(stage: Stage, experts: int) -> bool:
    """Alike pipelines may have other TP degrees, and other nodes, than the first of them."""
    tile = stage.expert_parallel, stage.expert_tensor
    homes = [node_of(device) for device in stage.devices]
    return tile == (1, 1) or tile in expert_tilings(homes, experts)


def _with_options(pipeline: Pipeline, s: int, like: Stage) -> Pipeline:
    changed = replace(
        pipeline.stages[s],
        zero=like.zero,
        expert_parallel=like.expert_parallel,
        expert_tensor=like.expert_tensor,
    )
    return replace(pipeline, stages=(*pipeline.stages[:s], changed, *pipeline.stages[s + 1 :]))


def _pipeline_moves(pipeline: Pipeline, kind_of: Callable[[Replica], object] | None) -> Iterator[Pipeline]:
    stages = pipeline.stages
    for s in range(len(stages) - 1):
        for step in (-1, 1):
            edge = stages[s].layers[1] + step
            if stages[s].layers[0] < edge < stages[s + 1].layers[1]:
                moved = (
                    replace(stages[s], layers=(stages[s].layers[0], edge)),
                    replace(stages[s + 1], layers=(edge, stages[s + 1].layers[1])),
                )
                yield replace(pipeline, stages=stages[:s] + moved + stages[s + 2 :])
    for s, stage in enumerate(stages):
        for changed in _stage_moves(stage, kind_of):
            yield replace(pipeline, stages=(*stages[:s], changed, *stages[s + 1 :]))


def _stage_moves(stage: Stage, kind_of: Callable[[Replica], object] | None) -> Iterator[Stage]:
    yield replace(stage, recompute=not stage.recompute)
    seen = set()
    for a, b in permutations(_two_of_each(stage, kind_of), 2):
        giver, taker = stage.replicas[a], stage.replicas[b]
        if giver.share > 1:
            shares = list(stage.shares)
            shares[a], shares[b] = shares[a] - 1, shares[b] + 1
            if tuple(shares) not in seen:
                seen.add(tuple(shares))
                yield replace(
                    stage,
                    replicas=tuple(replace(r, share=n) for r, n in zip(stage.replicas, shares, strict=True)),
                )
        if a < b and giver.share != taker.share:
            swapped = list(stage.replicas)
            swapped[a], swapped[b] = taker, giver
            yield replace(stage, replicas=tuple(swapped))


def _two_of_each(stage: Stage, kind_of: Callable[[Replica], object] | None) -> list[int]:
    """The first two replicas of each kind and share: to move samples among the others changes as much."""
    found: list[int] = []
    seen: Counter[object] = Counter()
    for r, replica in enumerate(stage.replicas):
        key = (kind_of(replica) if kind_of else r), replica.share
        seen[key] += 1
        if seen[key] <= 2:
            found.append(r)
    return found


def _count_moves(plan: Plan, givers: Sequence[int], takers: Sequence[int]) -> Iterator[Plan]:
    """Micro-batches from one pipeline to another, as few as keep the global batch."""
    for p in givers:
        for q in takers:
            give, take = plan.pipelines[p], plan.pipelines[q]
            if p == q:
                continue
            n = next(
                n for n in range(1, take.micro_batch + 1) if n * give.micro_batch % take.micro_batch == 0
            )
            if give.micro_batches > n:
                more = take.micro_batches + n * give.micro_batch // take.micro_batch
                yield _with(
                    plan,
                    {
                        p: replace(give, micro_batches=give.micro_batches - n),
                        q: replace(take, micro_batches=more),
                    },
                )


def placement_moves(plan: Plan, devices: Sequence[str]) -> Iterator[tuple[Placement, list[int]]]:
    """Moves of devices: to another stage, to and from idle; stages split, merged, swapped.

    With each placement the micro-batches that its pipelines had.
    """
    pipelines = placement_of(plan).pipelines
    sizes = [p.micro_batch for p in plan.pipelines]
    idle = [d for d in devices if d not in set(plan.devices)]
    for p, seats in enumerate(pipelines):
        for changed in _seat_moves(seats):
            yield _moved(pipelines, sizes, {p: changed})
        for s, stage in enumerate(seats):
            for r, seat in enumerate(stage):
                without = _without(seats, s, r)
                yield _moved(pipelines, sizes, {p: without})
                for q, other in enumerate(pipelines):
                    base = without if q == p else other
                    for changed in _placed(base, seat):
                        yield _moved(pipelines, sizes, {p: without} | {q: changed})
    for device in idle[:4]:
        for q, other in enumerate(pipelines):
            for changed in _placed(other, (device,)):
                yield _moved(pipelines, sizes, {q: changed})
    if idle:
        yield Placement((*pipelines, (tuple((d,) for d in idle),))), [*sizes, len(idle)]
        yield Placement((*pipelines, tuple(((d,),) for d in idle))), [*sizes, 1]


def _seat_moves(seats: PipelineSeats) -> Iterator[PipelineSeats]:
    """Merge or swap neighbour stages, swap seats of neighbours, split a stage in two."""
    for s in range(len(seats) - 1):
        a, b = seats[s], seats[s + 1]
        yield (*seats[:s], (*a, *b), *seats[s + 2 :])
        yield (*seats[:s], b, a, *seats[s + 2 :])
        for i in range(len(a)):
            for j in range(len(b)):
                yield (
                    *seats[:s],
                    (*a[:i], b[j], *a[i + 1 :]),
                    (*b[:j], a[i], *b[j + 1 :]),
                    *seats[s + 2 :],
                )
    for s, stage in enumerate(seats):
        for cut in range(1, len(stage)):
            yield (*seats[:s], stage[:cut], stage[cut:], *seats[s + 1 :])


def _without(seats: PipelineSeats, s: int, r: int) -> PipelineSeats:
    stage = (*seats[s][:r], *seats[s][r + 1 :])
    return (*seats[:s], *([stage] if stage else []), *seats[s + 1 :])


def _placed(seats: PipelineSeats, seat: tuple[str, ...]) -> Iterator[PipelineSeats]:
    """A replica more in some stage, or a stage more of this replica alone."""
    for s, stage in enumerate(seats):
        grown: StageSeats = (*stage, seat)
        yield (*seats[:s], grown, *seats[s + 1 :])
    for s in range(len(seats) + 1):
        yield (*seats[:s], (seat,), *seats[s:])


def _moved(
    pipelines: Sequence[PipelineSeats], sizes: Sequence[int], changed: dict[int, PipelineSeats]
) -> tuple[Placement, list[int]]:
    kept = [
        (changed.get(p, seats), size) for p, (seats, size) in enumerate(zip(pipelines, sizes, strict=True))
    ]
    kept = [(seats, size) for seats, size in kept if seats]
    return Placement(tuple(seats for seats, _ in kept)), [size for _, size in kept]


def _of_one_cut(plan: Plan) -> list[list[int]]:
    """Pipelines with one cut and equal shares, in groups: what moves in one can move in all.

    Their devices may be of other types and their counts differ, unlike those of ``plan.alike``.
    """
    groups: dict[object, list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        key = pipeline.micro_batch, tuple((s.layers, s.recompute, s.shares) for s in pipeline.stages)
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def _renumbered(own: Pipeline, like: Pipeline) -> Pipeline:
    """``own`` with the blocks, shares and recomputation of ``like``."""
    return replace(
        own,
        stages=tuple(
            replace(
                b,
                replicas=tuple(
                    Replica(devices=r.devices, share=n) for r, n in zip(a.replicas, b.shares, strict=True)
                ),
            )
            for a, b in zip(own.stages, like.stages, strict=True)
        ),
    )


def _with(plan: Plan, changed: dict[int, Pipeline]) -> Plan:
    pipelines = (changed.get(p, pipeline) for p, pipeline in enumerate(plan.pipelines))
    return replace(plan, pipelines=tuple(pipelines))
