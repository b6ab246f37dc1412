"""The event simulation: against one too simple to be wrong, against its closed form, and monotone."""

import random
from itertools import pairwise
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import Work, stage_actions
from planner.cost import Estimate, price
from planner.cost.simulate import Actor, Stages, play
from planner.exhaustive import Limits, random_request
from planner.request import Request
from planner.search.cut import Cut
from tests.test_exhaustive import every_plan

KINDS = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)


def slow_and_simple(kind: ScheduleKind, micro_batches: int, stages: Stages) -> list[list[float]]:
    """Play a schedule by asking every action, again and again, whether all that it waits for is known."""
    ends: dict[tuple[int, int, str, int], float] = {}
    starts: dict[tuple[int, int, int], float] = {}
    orders = [stage_actions(kind, s, len(stages), micro_batches) for s in range(len(stages))]
    waiting = [
        (s, r, i) for s in range(len(stages)) for r in range(len(stages[s])) for i in range(len(orders[s]))
    ]
    while waiting:
        for s, r, i in list(waiting):
            action, actor = orders[s][i], stages[s][r]
            forward = action.work is Work.FORWARD
            neighbour = s - 1 if forward else s + 1
            sources = actor.from_before if forward else actor.from_behind
            inputs = [(neighbour, j, str(action.work), action.micro_batch) for j, _ in sources]
            if (i and (s, r, i - 1) not in starts) or any(key not in ends for key in inputs):
                continue
            posted, free = 0.0, 0.0
            if i:
                last = orders[s][i - 1]
                posted = starts[s, r, i - 1]
                tail = actor.forward_tail_s if last.work is Work.FORWARD else actor.backward_tail_s
                free = ends[s, r, str(last.work), last.micro_batch] + tail
            arrivals = [max(ends[k], posted) + hop for k, (_, hop) in zip(inputs, sources, strict=True)]
            starts[s, r, i] = max([free, *arrivals])
            took = actor.forward_s if forward else actor.backward_s
            ends[s, r, str(action.work), action.micro_batch] = starts[s, r, i] + took
            waiting.remove((s, r, i))
    return [
        [
            max(t for key, t in ends.items() if key[:2] == (s, r)) + a.backward_tail_s
            for r, a in enumerate(stage)
        ]
        for s, stage in enumerate(stages)
    ]


@st.composite
def any_stages(draw: st.DrawFn) -> Stages:
    """One to four stages of one to three replicas, some alike, every neighbour pair with some messages."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
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
                draw(seconds),
                tuple((a, f) for a, b, f, _ in met[s - 1] if b == r) if s else (),
                tuple((b, g) for a, b, _, g in met[s] if a == r) if s + 1 < len(widths) else (),
                draw(st.sampled_from([0.0, 0.25])),
                draw(st.sampled_from([0.0, 0.25])),
            )
            for r in range(width)
        )
        for s, width in enumerate(widths)
    )


@settings(deadline=None, max_examples=200)
@given(stages=any_stages(), micro_batches=st.integers(1, 6), kind=st.sampled_from(KINDS))
def test_the_simulation_agrees_with_the_simple_one(stages, micro_batches, kind):
    fast = play(kind, micro_batches, stages).ready_s
    simple = slow_and_simple(kind, micro_batches, stages)
    assert [list(row) for row in fast] == [pytest.approx(row) for row in simple]


def test_alike_senders_with_unlike_messages_are_waited_for_until_the_last():
    senders = (Actor(1.0, 1.0, (), ((0, 0.0),)), Actor(1.0, 1.0, (), ((0, 0.0),)))
    receiver = Actor(1.0, 1.0, ((0, 0.5), (1, 2.0)))
    assert play(KINDS[1], 1, (senders, (receiver,))).ready_s[1] == (1 + 2 + 1 + 1,)


@settings(deadline=None, max_examples=100)
@given(stages=any_stages(), micro_batches=st.integers(1, 6), kind=st.sampled_from(KINDS), data=st.data())
def test_a_faster_replica_never_makes_a_pipeline_slower(stages, micro_batches, kind, data):
    s = data.draw(st.integers(0, len(stages) - 1))
    r = data.draw(st.integers(0, len(stages[s]) - 1))
    old = stages[s][r]
    quick = Actor(old.forward_s / 2, old.backward_s / 2, old.from_before, old.from_behind)
    row = (*stages[s][:r], quick, *stages[s][r + 1 :])
    better = (*stages[:s], row, *stages[s + 1 :])
    assert play(kind, micro_batches, better).seconds <= play(kind, micro_batches, stages).seconds + 1e-9


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
