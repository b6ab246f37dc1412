"""The price of a plan, against timelines worked out by hand."""

import msgspec
import pytest

from arachne_runtime.errors import InvalidFileError, NotMeasuredError, UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import BlockSpec, ModelSpec, ParameterBytes
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.profile import BlockTiming, Profile, StepTiming, UpdateTiming
from planner.cost import Estimate, Infeasible, price, with_prediction
from planner.request import Request

FAST, SLOW = "fast", "slow"
GIB = 2**30
MB = 10**6


def cluster(*nodes: tuple[str, str, int], inter_GBps: float = 1.0, memory_GiB: float = 2.0) -> Cluster:
    """Nodes (name, device type, devices) on a network without latency; 1 GB/s makes 1 ms of 1 MB."""
    entries = [
        NodeEntry(name=n, device=t, gpus=g, memory_GiB=memory_GiB, intra_GBps=1e9) for n, t, g in nodes
    ]
    return Cluster(node=tuple(entries), network=Network(inter_GBps=inter_GBps, latency_us=0.0))


def model(num_blocks: int, output_bytes: int = 0, parameters: int = 0, activation: int = 0) -> ModelSpec:
    rows = [
        BlockSpec(
            kind="layer",
            parameters=parameters,
            activation_bytes=activation,
            output_bytes=output_bytes if i + 1 < num_blocks else 0,
            flops=1.0,
        )
        for i in range(num_blocks)
    ]
    return ModelSpec(
        name="m",
        sequence=1,
        blocks=tuple(rows),
        bytes_per_parameter=ParameterBytes(weight=4, gradient=4, optimizer=8),
    )


def profile(fast=(1.0, 2.0), slow=(2.0, 4.0), samples=(1, 2, 3, 4), update_s: float = 0.0) -> Profile:
    """Seconds a sample of forward and backward of one block on each type."""
    timings = [
        BlockTiming(kind="layer", device=d, samples=b, forward_s=f * b, backward_s=g * b)
        for d, (f, g) in ((FAST, fast), (SLOW, slow))
        for b in samples
    ]
    updates = [UpdateTiming(kind="layer", device=d, update_s=update_s) for d in (FAST, SLOW)]
    return Profile(model="m", sequence=1, timings=tuple(timings), updates=tuple(updates))


def request(nodes, spec, measured=None, global_batch=4, **options) -> Request:
    return Request(
        cluster=cluster(*nodes, **options),
        model=spec,
        profile=measured or profile(),
        global_batch=global_batch,
    )


def stage(layers, *replicas, **fields) -> Stage:
    """Replicas are (device, share)."""
    return Stage(layers=layers, replicas=tuple(Replica(devices=(d,), share=n) for d, n in replicas), **fields)


def plan(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B) -> Plan:
    """Pipelines are (micro-batches, stages...)."""
    rows = tuple(
        Pipeline(micro_batches=m, micro_batch=sum(s[0].shares), stages=tuple(s)) for m, *s in pipelines
    )
    total = sum(p.micro_batches * p.micro_batch for p in rows)
    return Plan(model="m", global_batch=total, sequence=1, schedule=schedule, pipelines=rows)


def ends(estimate: Estimate, device: str) -> dict[str, float]:
    """Rounded to a millisecond: a latency of 10 µs inside a node is not what these tests are about."""
    return {span.name: round(span.end_s, 3) for span in estimate.timeline[device]}


def test_one_device_does_everything_in_turn():
    ask = request([("a", FAST, 1)], model(3), profile(update_s=0.25))
    found = price(plan((4, stage((0, 3), ("a:0", 1)))), ask)
    assert found.iteration_s == pytest.approx(4 * 3 * 3.0 + 3 * 0.25)
    assert found.samples_per_s == pytest.approx(4 / found.iteration_s)


def test_two_stages_of_1f1b_by_hand():
    # forward 1, backward 2: 0F0 0-1, 0F1 1-2, 1F0 1-2, 1B0 2-4, 0B0 4-6, 1F1 4-5, 1B1 5-7, 0B1 7-9
    ask = request([("a", FAST, 2)], model(2), global_batch=2)
    found = price(plan((2, stage((0, 1), ("a:0", 1)), stage((1, 2), ("a:1", 1)))), ask)
    assert ends(found, "a:0") == {"0F0": 1, "0F1": 2, "0B0": 6, "0B1": 9, "update": 9}
    assert ends(found, "a:1") == {"1F0": 2, "1B0": 4, "1F1": 5, "1B1": 7, "update": 9}


def test_gpipe_does_all_forwards_first():
    ask = request([("a", FAST, 2)], model(2), global_batch=2)
    stages = stage((0, 1), ("a:0", 1)), stage((1, 2), ("a:1", 1))
    found = price(plan((2, *stages), schedule=ScheduleKind.GPIPE), ask)
    assert ends(found, "a:1") == {"1F0": 2, "1F1": 3, "1B0": 5, "1B1": 7, "update": 9}


def test_a_zero_bubble_plan_by_hand():
    # the backward of 2 is halved: 1F0 1-2, 1I0 2-3, 1F1 3-4, 1I1 4-5, 0I0 3-4, 0W0 4-5, 0I1 5-6
    ask = request([("a", FAST, 2)], model(2), global_batch=2)
    stages = stage((0, 1), ("a:0", 1)), stage((1, 2), ("a:1", 1))
    found = price(plan((2, *stages), schedule=ScheduleKind.ZERO_BUBBLE), ask)
    assert "gradients of weights: 50% of a backward, by FLOPs" in found.not_measured
    assert ends(found, "a:0") == {"0F0": 1, "0F1": 2, "0I0": 4, "0W0": 5, "0I1": 6, "0W1": 7, "update": 7}
    assert ends(found, "a:1") == {"1F0": 2, "1I0": 3, "1F1": 4, "1I1": 5, "1W0": 6, "1W1": 7, "update": 7}


def test_an_interleaved_plan_by_hand():
    # two devices, two stages each: a:0 has blocks 0 and 2, a:1 blocks 1 and 3
    ask = request([("a", FAST, 2)], model(4), profile(update_s=0.25), global_batch=2)
    devices = ("a:0", 1), ("a:1", 1)
    stages = [stage((b, b + 1), devices[b % 2]) for b in range(4)]
    found = price(plan((2, *stages), schedule=ScheduleKind.INTERLEAVED), ask)
    assert ends(found, "a:1") == {
        "1F0": 2, "1F1": 3, "3F0": 4, "3B0": 6, "3F1": 7, "3B1": 9, "1B0": 11, "1B1": 13, "update": 15.5,
    }  # fmt: skip
    assert found.iteration_s == pytest.approx(15.5, abs=1e-3)
    assert found.breakdown["a:0"].compute_s == 2 * 2 * 3.0
    assert found.breakdown["a:0"].update_s == pytest.approx(0.5)
    alone = price(plan((2, stage((0, 4), devices[0]))), ask)
    assert found.peak_bytes["a:0"] <= alone.peak_bytes["a:0"]


def test_a_hop_between_gpus_delays_the_next_stage_and_keeps_both_ends_from_computing():
    # 500 MB a sample over 1 GB/s: 0.5 s a hop, which stands before 1F1 and after 0F0 and 1B0
    ask = request([("a", FAST, 1), ("b", FAST, 1)], model(2, 500 * MB), global_batch=2, memory_GiB=64)
    found = price(plan((2, stage((0, 1), ("a:0", 1)), stage((1, 2), ("b:0", 1)))), ask)
    assert ends(found, "b:0") == {"1F0": 2.5, "1B0": 4.5, "1F1": 6.5, "1B1": 8.5, "update": 11}
    assert ends(found, "a:0") == {"0F0": 1, "0F1": 2.5, "0B0": 7, "0B1": 11, "update": 11}


def test_a_step_pays_the_fixed_cost_of_the_slowest_type_that_takes_part():
    steps = (StepTiming(device=FAST, step_s=0.25), StepTiming(device=SLOW, step_s=0.5))
    measured = msgspec.structs.replace(profile(), steps=steps, step_s=0.125)
    asked = request([("a", FAST, 1), ("b", SLOW, 1)], model(2), measured)
    bare = request([("a", FAST, 1), ("b", SLOW, 1)], model(2))
    alone = plan([4, stage((0, 2), ("a:0", 1))])
    both = plan([4, stage((0, 1), ("a:0", 1)), stage((1, 2), ("b:0", 1))])
    for asked_for, fixed_s in ((alone, 0.375), (both, 0.625)):
        with_s, without_s = (price(asked_for, r).iteration_s for r in (asked, bare))
        assert with_s - without_s == pytest.approx(fixed_s)


def test_the_slowest_replica_of_a_stage_sets_its_pace():
    ask = request([("a", FAST, 1), ("s", SLOW, 1)], model(2), global_batch=8)
    even = price(plan((1, stage((0, 2), ("a:0", 2), ("s:0", 2)))), ask)
    uneven = price(plan((1, stage((0, 2), ("a:0", 3), ("s:0", 1)))), ask)
    assert (even.iteration_s, uneven.iteration_s) == pytest.approx((2 * 2 * 6.0, 3 * 2 * 3.0))


def test_messages_go_between_overlapping_shares_only():
    # shares [3, 1] before [2, 2]: the first receiver needs two rows of the first, the second one of each
    nodes = [("a", FAST, 1), ("b", FAST, 1), ("c", FAST, 1), ("d", FAST, 1)]
    ask = request(nodes, model(2, 100 * MB), memory_GiB=64)
    found = price(
        plan((1, stage((0, 1), ("a:0", 3), ("b:0", 1)), stage((1, 2), ("c:0", 2), ("d:0", 2)))), ask
    )
    # a sends 0.2 and 0.1 one after the other: c has its rows at 3.3; d waits for a as well
    assert ends(found, "c:0")["1F0"] == pytest.approx(3 + 0.3 + 2)
    assert ends(found, "d:0")["1F0"] == pytest.approx(3 + 0.3 + 2)
    # backwards: c (2 rows) serves a; d serves a and b
    done = 5.3 + 4
    assert ends(found, "a:0")["0B0"] == pytest.approx(done + 0.3 + 6)
    assert ends(found, "b:0")["0B0"] == pytest.approx(done + 0.2 + 2)


def test_devices_that_send_at_once_share_the_nic_of_their_node():
    spec = model(2, 100 * MB)
    wide = [("a", FAST, 2), ("b", FAST, 2)]
    one = price(
        plan((1, stage((0, 1), ("a:0", 2)), stage((1, 2), ("b:0", 2)))), request(wide, spec, memory_GiB=64)
    )
    two = price(
        plan((1, stage((0, 1), ("a:0", 2), ("a:1", 2)), stage((1, 2), ("b:0", 2), ("b:1", 2)))),
        request(wide, spec, memory_GiB=64),
    )
    assert ends(one, "b:0")["1F0"] == pytest.approx(2 + 0.2 + 2)
    assert ends(two, "b:0")["1F0"] == pytest.approx(2 + 0.4 + 2)


def test_recomputation_adds_one_forward_to_the_backward():
    ask = request([("a", FAST, 1)], model(2))
    found = price(plan((4, stage((0, 2), ("a:0", 1), recompute=True))), ask)
    assert found.iteration_s == pytest.approx(4 * 2 * (1 + 2 + 1))


def test_a_reduction_waits_for_the_last_holder_and_takes_a_ring():
    # 25 M parameters of 4 bytes: a ring of two sends 50 MB twice = 0.1 s at 1 GB/s
    ask = request([("a", FAST, 1), ("s", SLOW, 1)], model(1, parameters=25_000_000), global_batch=2)
    found = price(plan((1, stage((0, 1), ("a:0", 1), ("s:0", 1)))), ask)
    spans = {s.name: s for s in found.timeline["a:0"]}
    assert (spans["0B0"].end_s, spans["0:1"].start_s) == (3.0, 6.0)
    assert spans["0:1"].end_s == pytest.approx(6.1)


def test_large_reductions_go_in_buckets_that_each_pay_their_latency():
    # 100 MB are 3 buckets of 25 MiB and more; a ring of two sends two messages for each, of 1 ms latency
    entries = tuple(NodeEntry(name=n, device=FAST, gpus=1, memory_GiB=8.0) for n in ("a", "b"))
    ask = Request(
        cluster=Cluster(node=entries, network=Network(inter_GBps=1.0, latency_us=1000.0)),
        model=model(1, parameters=25_000_000),
        profile=profile(),
        global_batch=2,
    )
    found = price(plan((1, stage((0, 1), ("a:0", 1), ("b:0", 1)))), ask)
    reduction = next(s for s in found.timeline["a:0"] if s.name == "0:1")
    assert reduction.end_s - reduction.start_s == pytest.approx(0.1 + 3 * 2 * 0.001)


def test_segments_reduce_in_descending_order_each_over_its_own_holders():
    # one pipeline cut at 1, one uncut: segments 0:1 and 1:2; the uncut device reduces 1:2 first
    nodes = [("a", FAST, 1), ("b", FAST, 1), ("c", FAST, 1)]
    ask = request(nodes, model(2, parameters=25_000_000))
    found = price(
        plan((2, stage((0, 1), ("a:0", 1)), stage((1, 2), ("b:0", 1))), (1, stage((0, 2), ("c:0", 1)))), ask
    )
    spans = {s.name: s for s in found.timeline["c:0"]}
    assert spans["1:2"].start_s == pytest.approx(7.0)
    assert spans["0:1"].start_s == pytest.approx(9.0)
    assert [s.name for s in found.timeline["a:0"]][-2:] == ["0:1", "update"]
    assert found.iteration_s == pytest.approx(9.1)


def test_tied_parameters_are_reduced_over_the_holders_of_both_blocks():
    base = model(2, parameters=25_000_000)
    head = BlockSpec(
        kind="layer",
        parameters=25_000_000,
        activation_bytes=0,
        output_bytes=0,
        flops=1.0,
        tied_to=0,
        tied_parameters=25_000_000,
    )
    tied = ModelSpec(name="m", sequence=1, blocks=(base.blocks[0], head))
    ask = request([("a", FAST, 1), ("b", FAST, 1)], tied, global_batch=1)
    split = price(plan((1, stage((0, 1), ("a:0", 1)), stage((1, 2), ("b:0", 1)))), ask)
    assert [s.name for s in split.timeline["a:0"]][-2:] == ["tie:0", "update"]
    assert split.iteration_s == pytest.approx(6 + 0.1)
    whole = price(plan((1, stage((0, 2), ("a:0", 1)))), ask)
    assert whole.iteration_s == pytest.approx(6)
    # held once by the device that has both blocks
    assert whole.peak_bytes["a:0"] == split.peak_bytes["a:0"] > GIB + 25_000_000 * 16


def test_zero_one_divides_the_optimizer_step_among_the_replicas():
    ask = request([("a", FAST, 2)], model(1), profile(update_s=1.0), global_batch=2)
    whole, divided = (
        price(plan((1, stage((0, 1), ("a:0", 1), ("a:1", 1), zero=zero))), ask).iteration_s for zero in (0, 1)
    )
    assert whole - divided == pytest.approx(0.5)


def test_the_parts_of_every_device_add_up_to_the_iteration():
    nodes = [("a", FAST, 1), ("b", SLOW, 1), ("c", FAST, 1)]
    ask = request(nodes, model(3, 50 * MB, parameters=1_000_000), profile(update_s=0.1), memory_GiB=64)
    found = price(
        plan((3, stage((0, 2), ("a:0", 1)), stage((2, 3), ("b:0", 1))), (1, stage((0, 3), ("c:0", 1)))), ask
    )
    for parts in found.breakdown.values():
        total = parts.compute_s + parts.bubble_s + parts.hop_s + parts.sync_s + parts.update_s
        assert total == pytest.approx(found.iteration_s)
        assert min(parts.compute_s, parts.bubble_s, parts.hop_s, parts.sync_s, parts.update_s) >= 0
    assert "stage 0 of pipeline 0" in found.limits


def test_a_plan_that_does_not_fit_names_the_device_and_the_bytes():
    ask = request([("a", FAST, 2)], model(2, activation=GIB))
    found = price(plan((2, stage((0, 1), ("a:0", 1)), stage((1, 2), ("a:1", 1)))), ask)
    assert isinstance(found, Infeasible)
    assert (found.pipeline, found.stage, found.device) == (0, 0, "a:0")
    assert "a:0 (pipeline 0, stage 0)" in found.reason


def test_with_prediction_fills_in_what_the_price_says():
    ask = request([("a", FAST, 1)], model(3))
    filled = with_prediction(plan((4, stage((0, 3), ("a:0", 1)))), ask)
    assert filled.predicted.iteration_s == pytest.approx(36)
    assert filled.predicted.peak_bytes["a:0"] > 0


def test_what_was_not_measured_is_not_zero():
    ask = request([("a", FAST, 1)], model(3), global_batch=8)
    with pytest.raises(NotMeasuredError, match="8 samples"):
        price(plan((1, stage((0, 3), ("a:0", 8)))), ask)
    with pytest.raises(UsageError, match="node 'z'"):
        price(plan((4, stage((0, 3), ("z:0", 1)))), ask)
    with pytest.raises(UsageError, match=r"a:7.*1 devices"):
        price(plan((4, stage((0, 3), ("a:7", 1)))), ask)


def test_a_request_names_the_device_type_without_measurements():
    with pytest.raises(NotMeasuredError, match=r"'odd'.*measured types: fast, slow.*arachne profile"):
        request([("a", FAST, 1), ("o", "odd", 1)], model(3))


def test_a_request_refuses_what_does_not_belong_together():
    with pytest.raises(InvalidFileError, match=r"\$.model .*measures 'm'"):
        request([("a", FAST, 1)], ModelSpec(name="other", sequence=1, blocks=model(2).blocks))
    with pytest.raises(UsageError, match="global batch 0"):
        request([("a", FAST, 1)], model(2), global_batch=0)
    unknown = Cluster(node=(NodeEntry(name="q", device="fast", gpus=2),), network=Network(inter_GBps=1))
    with pytest.raises(InvalidFileError, match=r"\$.node\[0\].device .*memory_GiB"):
        Request(cluster=unknown, model=model(2), profile=profile(), global_batch=1)
