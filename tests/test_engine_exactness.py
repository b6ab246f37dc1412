"""Any plan trains like one process: random plans on real ranks."""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks
from bench.cases import Case, gap, train_all_by_plan, train_plainly
from tests.strategies import plans


def stage(layers, *replicas, recompute=False):
    found = tuple(Replica(devices=(device,), share=share) for device, share in replicas)
    return Stage(layers=layers, replicas=found, recompute=recompute)


def plan_of(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B):
    rows = sum(p.micro_batches * p.micro_batch for p in pipelines)
    return Plan(model="tiny", global_batch=rows, sequence=4, schedule=schedule, pipelines=pipelines)


WIDE = plan_of(
    Pipeline(micro_batches=5, micro_batch=4, stages=(
        stage((0, 2), ("a:0", 3), ("a:1", 1)), stage((2, 5), ("a:2", 2), ("a:3", 2)),
    )),
)  # fmt: skip
UNLIKE = plan_of(
    Pipeline(micro_batches=5, micro_batch=2, stages=(
        stage((0, 1), ("a:0", 2)), stage((1, 3), ("a:1", 2), recompute=True), stage((3, 5), ("b:0", 2)),
    )),
    Pipeline(micro_batches=3, micro_batch=1, stages=(stage((0, 4), ("b:1", 1)), stage((4, 5), ("c:0", 1)))),
)  # fmt: skip
LINE = plan_of(
    Pipeline(micro_batches=4, micro_batch=2, stages=(
        stage((0, 2), ("a:0", 2)), stage((2, 3), ("a:1", 1), ("a:2", 1)), stage((3, 5), ("a:3", 2)),
    )),
)  # fmt: skip


def outcomes_of(cases):
    """What every rank found, by case; cases of one number of ranks share a call."""
    found = run_ranks(len(cases[0].plan.devices), train_all_by_plan, cases)
    return zip(*found, strict=True)


def check(cases, tolerance=1e-9):
    by_size = defaultdict(list)
    for case in cases:
        by_size[len(case.plan.devices)].append(case)
    for alike in by_size.values():
        for case, outcomes in zip(alike, outcomes_of(alike), strict=True):
            wanted = train_plainly(case)
            held = {name for outcome in outcomes for name in outcome.parameters}
            assert held == set(wanted.parameters)
            for outcome in outcomes:
                assert outcome.losses == outcomes[0].losses
                found = gap(outcome, wanted)
                largest = max(found.loss, found.norm, found.parameter, found.gradient)
                assert largest < tolerance, (case, found)


def test_replicas_with_unequal_shares():
    items = Case(WIDE, by_items=True, scheduled=True, tied=False)
    check(
        [Case(WIDE), Case(WIDE, adam=True, clip_norm=0.1), items, Case(WIDE, blocking=True, in_pieces=True)]
    )


def test_unlike_pipelines():
    both = Case(UNLIKE, adam=True, clip_norm=0.1, by_items=True)
    check([Case(UNLIKE), both, Case(UNLIKE, blocking=True, in_pieces=True)])


def test_seven_rows_in_four_micro_batches():
    gpipe = plan_of(*LINE.pipelines, schedule=ScheduleKind.GPIPE)
    check(
        [Case(LINE, rows=(7, 1, 8)), Case(gpipe, rows=(7, 2, 3)), Case(gpipe, rows=(7, 7, 7), blocking=True)]
    )


def turns(layers, *rows, micro_batches, micro_batch):
    """Stages dealt out to sets of devices in turns."""
    stages = tuple(stage(span, *rows[i % len(rows)]) for i, span in enumerate(pairwise(layers)))
    return Pipeline(micro_batches=micro_batches, micro_batch=micro_batch, stages=stages)


def test_a_rank_that_holds_several_stages():
    wide = turns((0, 1, 2, 3, 5), (("a:0", 2),), (("a:1", 1), ("a:2", 1)), micro_batches=3, micro_batch=2)
    alone = turns((0, 2, 3, 5), (("b:0", 1),), micro_batches=2, micro_batch=1)
    plan = plan_of(wide, alone, schedule=ScheduleKind.INTERLEAVED)
    both = Case(plan, adam=True, clip_norm=0.1, by_items=True, rows=(7, 1, 8))
    check([Case(plan), both, Case(plan, blocking=True, in_pieces=True, tied=False)])


def test_a_single_process_needs_no_plan_of_its_own():
    alone = plan_of(Pipeline(micro_batches=2, micro_batch=3, stages=(stage((0, 4), ("a:0", 3)),)))
    check([Case(alone, clip_norm=0.2), Case(alone, by_items=True)])


CASES = st.builds(
    Case,
    plans(tp=1, max_devices=6, num_blocks=5, schedules=tuple(ScheduleKind)),
    tied=st.booleans(),
    adam=st.booleans(),
    clip_norm=st.sampled_from((None, 0.1, 100.0)),
    by_items=st.booleans(),
    scheduled=st.booleans(),
    blocking=st.booleans(),
    in_pieces=st.booleans(),
)


def without_shrinking(examples):
    """Each example is many runs: shrinking it would take minutes."""
    phases = (Phase.explicit, Phase.generate)
    slow = (HealthCheck.too_slow, HealthCheck.data_too_large)
    return settings(max_examples=examples, deadline=None, phases=phases, suppress_health_check=slow)


@without_shrinking(3)
@given(cases=st.lists(CASES, min_size=8, max_size=8))
def test_any_plan_trains_like_one_process(cases):
    check(cases)


def test_single_precision_differs_by_rounding_only():
    for case in (Case(WIDE, dtype=torch.float32), Case(UNLIKE, dtype=torch.float32, adam=True)):
        wanted = train_plainly(case)
        for outcome in next(iter(outcomes_of([case]))):
            found = gap(outcome, wanted)
            assert max(found.loss, found.gradient) < 1e-5
            assert case.adam or found.parameter < 1e-5


def test_the_comparison_can_fail():
    case = Case(LINE)
    wanted = train_plainly(replace(case, clip_norm=0.05))
    assert all(gap(o, wanted).parameter > 1e-6 for o in next(iter(outcomes_of([case]))))


def test_results_do_not_depend_on_the_hash_seed_or_the_run():
    random.seed(0)
    first, second = (next(iter(outcomes_of([Case(UNLIKE)]))) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.losses == b.losses
        assert all(torch.equal(p, b.parameters[name]) for name, p in a.parameters.items())
