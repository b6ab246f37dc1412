"""The share of the ideal and what takes the rest: by hand, and adding up for any plan."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.profile import BlockTiming, Profile, TpCommunication, UpdateTiming
from planner.explain import Losses, LossKind, share_of_ideal
from planner.request import Request
from tests.strategies import problems

TYPES = ("A100-40", "V100-16")
NEVER_NEGATIVE = set(LossKind) - {LossKind.PLACEMENT}


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_ideal_and_losses_add_up_to_the_iteration(data):
    plan, request = data.draw(problems(types=TYPES))
    losses = share_of_ideal(plan, request)
    assert losses.ideal_s + sum(loss.seconds for loss in losses.parts) == pytest.approx(losses.iteration_s)
    assert [loss.kind for loss in losses.parts] == list(LossKind)
    assert losses.share_of_ideal > 0
    for kind in NEVER_NEGATIVE:
        assert losses.seconds(kind) >= -1e-9 * losses.iteration_s, kind


# --- by hand: one block costs 1 s forward and 2 s backward a sample on "fast", twice that on "slow"


def problem(
    *nodes: tuple[str, str, int],
    batch: int,
    blocks: int = 2,
    output_bytes: int = 0,
    parameters: int = 0,
    activations: int = 0,
    memory_GiB: float = 40.0,
    schedules: tuple[ScheduleKind, ...] = (ScheduleKind.ONE_F_ONE_B,),
    **fields,
) -> Request:
    entries = tuple(
        NodeEntry(name=n, device=t, gpus=g, memory_GiB=memory_GiB, intra_GBps=1e9) for n, t, g in nodes
    )
    layer = BlockSpec(
        kind="layer",
        parameters=parameters,
        activation_bytes=activations,
        output_bytes=output_bytes,
        flops=1.0,
    )
    timings = [
        BlockTiming(
            kind="layer",
            device=d,
            tp=tp,
            samples=n,
            forward_s=factor * n / tp**0.5,
            backward_s=2 * factor * n / tp**0.5,
        )
        for d, factor in (("fast", 1.0), ("slow", 2.0))
        for n in (1, 2, 4)
        for tp in (1, 4)
    ]
    updates = tuple(
        UpdateTiming(kind="layer", device=d, tp=tp, update_s=0.0) for d in ("fast", "slow") for tp in (1, 4)
    )
    return Request(
        cluster=Cluster(node=entries, network=Network(inter_GBps=1.0, latency_us=0.0)),
        model=ModelSpec(name="m", sequence=1, blocks=(layer,) * blocks),
        profile=Profile(model="m", sequence=1, timings=tuple(timings), updates=updates, **fields),
        global_batch=batch,
        schedules=schedules,
    )


def stage(layers: tuple[int, int], *replicas: tuple[str, int], **fields) -> Stage:
    """Replicas are (devices in one text, share)."""
    return Stage(
        layers=layers,
        replicas=tuple(Replica(devices=tuple(names.split()), share=share) for names, share in replicas),
        **fields,
    )


def plan_of(request: Request, micro_batches: int, *stages: Stage) -> Plan:
    size = sum(stages[0].shares)
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=size, stages=stages)
    return Plan(model="m", global_batch=micro_batches * size, sequence=1, pipelines=(pipeline,))


def only(losses: Losses, **expected: float) -> None:
    """These losses and no others, beside the reductions' and the optimizer's microseconds."""
    for loss in losses.parts:
        assert loss.seconds == pytest.approx(expected.pop(loss.kind.name, 0.0), abs=1e-3), loss.kind
    assert not expected


def test_shares_in_proportion_to_speed_reach_the_ideal():
    request = problem(("f", "fast", 1), ("s", "slow", 1), batch=6)
    losses = share_of_ideal(plan_of(request, 2, stage((0, 2), ("f:0", 2), ("s:0", 1))), request)
    assert losses.ideal_s == pytest.approx(6 / (1 / 6 + 1 / 12))
    only(losses)
    assert losses.share_of_ideal == pytest.approx(1.0, abs=1e-3)


def test_equal_shares_on_unequal_devices_are_granularity():
    request = problem(("f", "fast", 1), ("s", "slow", 1), batch=4)
    losses = share_of_ideal(plan_of(request, 2, stage((0, 2), ("f:0", 1), ("s:0", 1))), request)
    # 24 s, of which the fast device waits 12: two thirds of the cluster's speed
    only(losses, GRANULARITY=12 * 2 / 3)


def test_a_device_without_a_stage_is_idle():
    request = problem(("f", "fast", 2), batch=2)
    losses = share_of_ideal(plan_of(request, 2, stage((0, 2), ("f:0", 1))), request)
    only(losses, IDLE=6.0)


def test_equal_stages_lose_bubbles_only():
    request = problem(("f", "fast", 2), batch=4)
    losses = share_of_ideal(
        plan_of(request, 4, stage((0, 1), ("f:0", 1)), stage((1, 2), ("f:1", 1))), request
    )
    only(losses, BUBBLES=3.0)  # one of five slots of 3 s


def test_a_schedule_of_two_stages_a_device_halves_the_bubble():
    request = problem(("f", "fast", 2), batch=4, blocks=4, schedules=(ScheduleKind.INTERLEAVED,))
    stages = [stage((s, s + 1), (f"f:{s % 2}", 1)) for s in range(4)]
    plan = msgspec.structs.replace(plan_of(request, 4, *stages), schedule=ScheduleKind.INTERLEAVED)
    only(share_of_ideal(plan, request), BUBBLES=3.0)  # half of the 6 s that a stage of two blocks takes


def test_a_zero_bubble_schedule_leaves_a_third():
    request = problem(("f", "fast", 2), batch=4, schedules=(ScheduleKind.ZERO_BUBBLE,))
    plan = plan_of(request, 4, stage((0, 1), ("f:0", 1)), stage((1, 2), ("f:1", 1)))
    plan = msgspec.structs.replace(plan, schedule=ScheduleKind.ZERO_BUBBLE)
    only(share_of_ideal(plan, request), BUBBLES=1.0)


def test_recomputation_is_a_forward():
    request = problem(("f", "fast", 1), batch=2)
    losses = share_of_ideal(plan_of(request, 2, stage((0, 2), ("f:0", 1), recompute=True)), request)
    only(losses, RECOMPUTE=4.0)


def test_a_group_of_four_that_is_twice_as_fast_loses_half():
    request = problem(("f", "fast", 4), batch=4)
    losses = share_of_ideal(plan_of(request, 2, stage((0, 2), ("f:0 f:1 f:2 f:3", 2))), request)
    only(losses, TENSOR=6.0)  # 12 s where four devices alone take 6


def test_collectives_that_the_profile_leaves_out_are_tensor_parallelism():
    request = problem(
        ("f", "fast", 4), batch=4, output_bytes=10**9, tp_communication=TpCommunication.EXCLUDED
    )
    losses = share_of_ideal(plan_of(request, 2, stage((0, 2), ("f:0 f:1 f:2 f:3", 2))), request)
    assert losses.seconds(LossKind.TENSOR) > 6.0


def test_messages_are_hops():
    request = problem(("f", "fast", 1), ("g", "fast", 1), batch=4, output_bytes=10**9)
    losses = share_of_ideal(
        plan_of(request, 4, stage((0, 1), ("f:0", 1)), stage((1, 2), ("g:0", 1))), request
    )
    assert losses.seconds(LossKind.HOPS) > 1.9  # 1 s there and back
    assert losses.seconds(LossKind.BUBBLES) == pytest.approx(3.0)


def test_fixed_seconds_are_counted_apart():
    request = problem(("f", "fast", 1), batch=1, step_s=0.5)
    only(share_of_ideal(plan_of(request, 1, stage((0, 2), ("f:0", 1))), request), UPDATE=0.5)


def test_a_plan_that_does_not_fit_is_refused():
    request = problem(("f", "fast", 1), batch=1, output_bytes=2**40)
    with pytest.raises(NoFeasiblePlanError, match="would need"):
        share_of_ideal(plan_of(request, 1, stage((0, 2), ("f:0", 1))), request)
