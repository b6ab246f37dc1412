"""The event simulation: against one too simple to be wrong, against its closed form, and monotone."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import PRICEABLE, Work, row_actions
from planner.cost import Estimate, price
from planner.cost.simulate import Actor, Stages, play
from planner.cuts import Cut
from planner.exhaustive import Limits, random_request
from planner.request import Request
from tests.test_exhaustive import every_plan

KINDS = PRICEABLE


def slow_and_simple(kind: ScheduleKind, micro_batches: int, stages: Stages, rows: int) -> list[list[float]]:
    """Play a schedule by asking every action, again and again, whether all that it waits for is known."""
    ends: dict[tuple[int, int, str, int], float] = {}
    free_at: dict[tuple[int, int, int], float] = {}
    starts: dict[tuple[int, int, int], float] = {}
    orders = [row_actions(kind, row, rows, len(stages), micro_batches) for row in range(rows)]
    waiting = [
        (row, r, i) for row in range(rows) for r in range(len(stages[row])) for i in range(len(orders[row]))
    ]
    while waiting:
        for row, r, i in list(waiting):
            action = orders[row][i]
            s = action.stage
            actor = stages[s][r]
            forward = action.work is Work.FORWARD
            neighbour = s - 1 if forward else s + 1
            sources = {Work.FORWARD: actor.from_before, Work.WEIGHT: ()}.get(action.work, actor.from_behind)
            inputs = [(neighbour, j, str(action.work), action.micro_batch) for j, _ in sources]
            if (i and (row, r, i - 1) not in starts) or any(key not in ends for key in inputs):
                continue
            posted = starts[row, r, i - 1] if i else 0.0
            free = free_at[row, r, i - 1] if i else 0.0
            arrivals = [max(ends[k], posted) + hop for k, (_, hop) in zip(inputs, sources, strict=True)]
            starts[row, r, i] = max([free, *arrivals])
            end = ends[s, r, str(action.work), action.micro_batch] = starts[row, r, i] + TOOK[action.work](
                actor
            )
            tails = {Work.FORWARD: actor.forward_tail_s, Work.WEIGHT: 0.0}
            free_at[row, r, i] = end + tails.get(action.work, actor.backward_tail_s)
            waiting.remove((row, r, i))
    return [
        [free_at[s % rows, r, len(orders[s % rows]) - 1] for r in range(len(stages[s]))]
        for s in range(len(stages))
    ]


TOOK = {
    Work.FORWARD: lambda a: a.forward_s,
    Work.BACKWARD: lambda a: a.backward_s,
    Work.INPUT: lambda a: a.backward_s - a.weight_s,
    Work.WEIGHT: lambda a: a.weight_s,
}


@st.composite
def any_stages(draw: st.DrawFn, chunks: int = 1) -> Stages:
    """One to four stages of one to three replicas, some alike, every neighbour pair with some messages."""
    widths = chunks * draw(st.lists(st.integers(1, 3), min_size=1, max_size=4 if chunks == 1 else 3))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0])
    met = [
        [
            (a, b, draw(seconds), draw(seconds))
            for a in range(before)
            for b in range(after)
            if a % after == b or b % before == a or draw(st.booleans())
        ]
        for before, after in pairwise(widths)
    ]
    return tuple(
        tuple(
            Actor(
                draw(seconds),
                1.0 + draw(seconds),
                tuple((a, f) for a, b, f, _ in met[s - 1] if b == r) if s else (),
                tuple((b, g) for a, b, _, g in met[s] if a == r) if s + 1 < len(widths) else (),
                draw(st.sampled_from([0.0, 0.25])),
                draw(st.sampled_from([0.0, 0.25])),
                draw(st.sampled_from([0.0, 0.5, 1.0])),
            )
            for r in range(width)
        )
        for s, width in enumerate(widths)
    )


def rows_of(kind: ScheduleKind, stages: Stages, chunks: int) -> int:
    return len(stages) // chunks if kind is ScheduleKind.INTERLEAVED else len(stages)


@settings(deadline=None, max_examples=200)
@given(micro_batches=st.integers(1, 6), kind=st.sampled_from(KINDS), chunks=st.integers(1, 3), data=st.data())
def test_the_simulation_agrees_with_the_simple_one(micro_batches, kind, chunks, data):
    chunks = chunks if kind is ScheduleKind.INTERLEAVED else 1
    stages = data.draw(any_stages(chunks))
    rows = rows_of(kind, stages, chunks)
    fast = play(kind, micro_batches, stages, rows).ready_s
    simple = slow_and_simple(kind, micro_batches, stages, rows)
    assert [list(row) for row in fast] == [pytest.approx(row) for row in simple]


def test_alike_senders_with_unlike_messages_are_waited_for_until_the_last():
    senders = (Actor(1.0, 1.0, (), ((0, 0.0),)), Actor(1.0, 1.0, (), ((0, 0.0),)))
    receiver = Actor(1.0, 1.0, ((0, 0.5), (1, 2.0)))
    assert play(KINDS[1], 1, (senders, (receiver,))).ready_s[1] == (1 + 2 + 1 + 1,)


@settings(deadline=None, max_examples=150)
@given(micro_batches=st.integers(1, 6), kind=st.sampled_from(KINDS), chunks=st.integers(1, 3), data=st.data())
def test_a_faster_replica_never_makes_a_pipeline_slower(micro_batches, kind, chunks, data):
    chunks = chunks if kind is ScheduleKind.INTERLEAVED else 1
    stages = data.draw(any_stages(chunks))
    rows = rows_of(kind, stages, chunks)
    s = data.draw(st.integers(0, len(stages) - 1))
    r = data.draw(st.integers(0, len(stages[s]) - 1))
    old = stages[s][r]
    halves = {"forward_s": old.forward_s / 2, "backward_s": old.backward_s / 2, "weight_s": old.weight_s / 2}
    quick = replace(old, **halves, forward_tail_s=0.0, backward_tail_s=0.0)
    better = (*stages[:s], (*stages[s][:r], quick, *stages[s][r + 1 :]), *stages[s + 1 :])
    after = play(kind, micro_batches, better, rows).seconds
    assert after <= play(kind, micro_batches, stages, rows).seconds + 1e-9


def test_bubbles_of_the_schedules_by_hand():
    # 4 sets of devices, 8 micro-batches, forward 1, gradients of inputs and of weights 1 each, no messages
    def seconds(kind: ScheduleKind, chunks: int = 1) -> float:
        stages = [
            replace(row[0], weight_s=1 / chunks) for row in chain([(1 / chunks, 2 / chunks)] * 4 * chunks)
        ]
        return play(kind, 8, tuple((a,) for a in stages), 4).seconds

    assert seconds(ScheduleKind.ONE_F_ONE_B) == 3 * 8 + 3 * 3
    assert seconds(ScheduleKind.INTERLEAVED, 2) == pytest.approx(3 * 8 + 3 * 3 / 2)
    assert seconds(ScheduleKind.ZERO_BUBBLE) == 3 * 8 + 3  # (p - 1) (f + i - w), arXiv 2401.10241


def chain(seconds: list[tuple[float, float]]) -> Stages:
    last = len(seconds) - 1
    return tuple(
        (Actor(f, b, ((0, 0.0),) if i else (), ((0, 0.0),) if i < last else ()),)
        for i, (f, b) in enumerate(seconds)
    )


def test_the_closed_form_is_never_low_and_a_little_high():
    rng = random.Random(1)
    high = []
    for _ in range(2000):
        depth, micro_batches = rng.randint(2, 8), rng.randint(1, 32)
        seconds = [(rng.uniform(0.3, 1), rng.uniform(0.3, 3)) for _ in range(depth)]
        found = play(ScheduleKind.ONE_F_ONE_B, micro_batches, chain(seconds)).seconds
        both = [f + b for f, b in seconds]
        high.append(Cut((), max(both), sum(both)).pipeline_s(micro_batches) / found - 1)
    assert min(high) > -1e-9
    assert max(high) < 0.3
    assert mean(high) < 0.04


def faster(request: Request, device: str) -> Request:
    """The same problem, one device type twice as fast at everything."""
    timings = [
        msgspec.structs.replace(t, forward_s=t.forward_s / 2, backward_s=t.backward_s / 2)
        if t.device == device
        else t
        for t in request.profile.timings
    ]
    return Request(
        cluster=request.cluster,
        model=request.model,
        profile=msgspec.structs.replace(request.profile, timings=tuple(timings)),
        global_batch=request.global_batch,
        schedules=request.schedules,
        max_micro_batch=request.max_micro_batch,
    )


def test_faster_devices_never_make_a_plan_slower():
    changed = 0
    for seed in range(12):
        request = random_request(seed, Limits(devices=3, blocks=3, global_batch=4, micro_batch=2))
        better = faster(request, "slow")
        plans = list(every_plan(request))
        for plan in random.Random(seed).sample(plans, min(40, len(plans))):
            slow, fast = price(plan, request), price(plan, better)
            if isinstance(slow, Estimate):
                assert fast.iteration_s <= slow.iteration_s * (1 + 1e-12)
                changed += fast.iteration_s < slow.iteration_s
    assert changed > 50
