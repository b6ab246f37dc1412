"""Plans without a planner: what is left of the first plan, and back to it."""

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.plan import Pipeline, Plan, Predicted, Replica, ScheduleKind, Stage
from arachne_runtime.plan.rules import check_plan
from launch.coordinator.deal import Taker, deal
from launch.coordinator.shrink import Shrinker, shrunk

from .strategies import plans


def stage(layers, **shares) -> Stage:
    """A replica of one device a keyword: ``a0=2`` is device a:0 with 2 samples."""
    replicas = tuple(Replica(devices=(f"{name[0]}:{name[1:]}",), share=n) for name, n in shares.items())
    return Stage(layers=layers, replicas=replicas)


def plan(*pipelines: tuple[int, tuple[Stage, ...]], **changes) -> Plan:
    """Of pipelines ``(micro_batches, stages)``."""
    whole = tuple(
        Pipeline(micro_batches=count, micro_batch=sum(stages[0].shares), stages=stages)
        for count, stages in pipelines
    )
    batch = sum(p.micro_batches * p.micro_batch for p in whole)
    return Plan(model="tiny", global_batch=batch, sequence=8, pipelines=whole, **changes)


TWO_BY_TWO = plan(
    (4, (stage((0, 2), a0=2, a1=1), stage((2, 4), b0=1, b1=2))),
    (6, (stage((0, 3), c0=4), stage((3, 4), c1=4))),
)


def test_a_replica_is_left_out_where_its_stage_has_another():
    found = shrunk(TWO_BY_TWO, set(TWO_BY_TWO.devices) - {"a:1"})
    assert "a:1" not in found.plan.devices
    first, second = found.plan.pipelines
    assert first.micro_batch <= 2  # no replica holds more at a time than it did
    assert len(found.plan.devices) == 5
    assert first.micro_batches * first.micro_batch + second.micro_batches * second.micro_batch == 36
    assert first.micro_batches * first.micro_batch < 12 < second.micro_batches * second.micro_batch
    assert not check_plan(found.plan)


def test_a_pipeline_is_left_out_where_a_stage_lost_all():
    found = shrunk(TWO_BY_TWO, set(TWO_BY_TWO.devices) - {"c:1"})
    assert [p.stages[0].devices for p in found.plan.pipelines] == [("a:0", "a:1")]
    assert (found.plan.pipelines[0].micro_batches, found.plan.pipelines[0].micro_batch) == (12, 3)
    assert found.longer == pytest.approx(13 / 5)


def test_nothing_is_left_where_no_pipeline_is_whole():
    assert shrunk(TWO_BY_TWO, {"a:0", "c:0", "c:1"} - {"c:0"}) is None


def test_replicas_that_would_wait_for_the_tightest_stage_are_left_out():
    wide = plan((4, (stage((0, 2), a0=1, a1=1, a2=1, a3=1), stage((2, 4), b0=1, b1=1, b2=1, b3=1))))
    found = shrunk(wide, {"a:0", "a:1", "a:2", "a:3", "b:2"})
    assert found.plan.devices == ("a:0", "b:2")
    assert (found.plan.pipelines[0].micro_batches, found.plan.pipelines[0].micro_batch) == (16, 1)


def test_copies_of_shared_out_experts_stay_whole():
    experts = msgspec.structs.replace(stage((0, 4), a0=1, a1=1, a2=1, a3=1), expert_parallel=2)
    found = shrunk(plan((2, (experts,))), {"a:0", "a:2", "a:3"})
    assert found.plan.devices == ("a:2", "a:3")
    assert shrunk(plan((2, (experts,))), {"a:0", "a:2"}) is None


def test_larger_micro_batches_only_where_no_others_add_up():
    found = shrunk(plan((1, (stage((0, 4), a0=4),)), (1, (stage((0, 4), b0=3),))), {"a:0"})
    assert (found.plan.pipelines[0].micro_batches, found.plan.pipelines[0].micro_batch) == (7, 1)
    pair = plan((1, (stage((0, 4), a0=1, a1=1),)), (1, (stage((0, 4), b0=3),)))
    (only,) = shrunk(pair, {"a:0", "a:1"}).plan.pipelines
    assert (only.micro_batches, only.micro_batch, only.stages[0].shares) == (1, 5, (3, 2))


@settings(max_examples=150, deadline=None)
@given(
    plans(max_devices=9, max_share=5, max_pipelines=4, schedules=tuple(ScheduleKind)),
    st.data(),
)
def test_whatever_is_lost_the_rest_is_a_plan(first, data):
    there = data.draw(st.sets(st.sampled_from(first.devices)))
    whole = [
        p
        for p in first.pipelines
        if all(any(there.issuperset(r.devices) for r in s.replicas) for s in p.stages)
    ]
    found = shrunk(first, there)
    assert (found is None) is (not whole)
    assume(found is not None)
    assert check_plan(found.plan) == ()
    assert set(found.plan.devices) <= there
    assert found.plan.global_batch == first.global_batch
    assert len(found.plan.pipelines) == len(whole)
    cuts = [[s.layers for s in p.stages] for p in whole]
    assert [[s.layers for s in p.stages] for p in found.plan.pipelines] == cuts
    assert found.longer > 0


@pytest.mark.parametrize("predicted", [None, Predicted(iteration_s=2.0, samples_per_s=18.0)])
def test_it_shrinks_keeps_and_grows_back(predicted):
    first = msgspec.structs.replace(TWO_BY_TWO, predicted=predicted)
    shrinker, every = Shrinker(first), tuple(first.devices)
    assert shrinker.plan_for(every, None).plan == first
    fewer = shrinker.plan_for(tuple(d for d in every if d != "c:0"), first)
    assert fewer.samples_per_s < fewer.running_samples_per_s
    least = shrinker.plan_for(("a:0", "a:1", "b:1"), fewer.plan)
    assert set(least.plan.devices) == {"a:0", "a:1", "b:1"}
    same = shrinker.plan_for(("a:0", "a:1", "b:1", "d:7"), least.plan)
    assert (same.plan, same.migration_s) == (least.plan, 0)
    grown = shrinker.plan_for((*every, "d:7"), least.plan)
    assert (grown.plan, grown.samples_per_s > grown.running_samples_per_s) == (first, True)
    assert shrinker.plan_for(("a:0", "c:0"), least.plan) is None


def test_the_running_plan_is_shrunk_where_the_first_fits_nothing():
    first, running = plan((4, (stage((0, 4), a0=2),))), plan((4, (stage((0, 4), b0=1, b1=1),)))
    assert Shrinker(first).plan_for(("b:0",), running).plan.devices == ("b:0",)


def test_pipelines_that_were_alike_stay_in_balance():
    takers = [Taker(8, 2, ((4,), (4,)))] * 31
    splits = deal(32 * 8 * 4, takers)
    assert sum(split.samples for split in splits) == 1024
    assert {split.samples for split in splits} == {32, 36}
