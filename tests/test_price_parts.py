"""Links, memory and tables: the parts that a price is made of."""

import msgspec
import numpy as np
import pytest

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.plan.model import BlockSpec, ModelSpec, ParameterBytes
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.profile import (
    BlockTiming,
    LinkPoint,
    LinkScope,
    LinkTiming,
    Profile,
    TpCommunication,
    UpdateTiming,
)
from planner import catalog
from planner.cost import Estimate, in_flight, price, stage_memory
from planner.cost.fleet import Fleet
from planner.cost.links import Curve, Link
from planner.cost.tables import Tables
from planner.request import Request

MB = 10**6


def link(*curves: Curve, scope=LinkScope.INTER, latency_s=0.0, GBps=1e9) -> Link:
    return Link(scope, latency_s, 1 / (GBps * 1e9), curves)


def test_a_curve_is_linear_between_points_and_keeps_its_bandwidth_beyond():
    curve = Curve.of(1, [LinkPoint(bytes=100, seconds=2.0), LinkPoint(bytes=200, seconds=3.0)])
    assert [curve.at(x) for x in (100, 150, 200, 400)] == [2.0, 2.5, 3.0, 6.0]
    assert curve.at(50) == 1.5  # the line of the first two, towards a latency of 1
    assert Curve.of(1, [LinkPoint(bytes=100, seconds=2.0)]).at(50) == 1.0


def test_a_noisy_curve_never_makes_more_bytes_faster():
    points = [LinkPoint(bytes=b, seconds=s) for b, s in ((1, 5.0), (2, 4.0), (3, 6.0))]
    seconds = [Curve.of(1, points).at(x / 4) for x in range(1, 20)]
    assert seconds == sorted(seconds)


def test_more_senders_take_the_curve_of_as_many_and_beyond_it_share_the_nic():
    one, four = Curve(1, (100,), (1.0,)), Curve(4, (100,), (3.0,))
    shared = link(one, four)
    assert [shared.seconds(100, n) for n in (1, 2, 4, 8)] == pytest.approx([1.0, 3.0, 3.0, 6.0])
    alone = link(one, four, scope=LinkScope.INTRA)
    assert alone.seconds(100, 8) == pytest.approx(3.0)


def test_a_link_is_as_slow_as_the_slower_of_measured_and_stated():
    measured = Curve(1, (MB,), (1.0,))
    assert link(measured, GBps=10.0).seconds(MB) == 1.0
    assert link(measured, GBps=1e-4).seconds(MB) == pytest.approx(10.0)
    assert link(GBps=0.001, latency_s=0.5).seconds(MB, 2) == pytest.approx(0.5 + 2.0)


def test_no_message_is_faster_than_its_least_seconds_a_byte():
    curves = Curve(1, (10, 100, 1000), (1.0, 2.0, 30.0)), Curve(2, (10,), (2.0,))
    found = link(*curves)
    assert found.least_per_byte == 0.02
    assert all(found.seconds(x, n) >= x * 0.02 for x in range(1, 3000, 7) for n in (1, 2, 5))


def test_the_cluster_file_overrides_the_catalog():
    entry = NodeEntry(
        name="a", device="A100-40", gpus=4, count=2, memory_GiB=10, intra_GBps=3.0, price_per_hour=2.0
    )
    pair = NetworkPair(between=("a-0", "a-1"), inter_GBps=0.5, latency_us=7.0)
    fleet = Fleet(
        Cluster(node=(entry,), network=Network(inter_GBps=9.0, pair=(pair,))), catalog.profile("opt-350m")
    )
    node = fleet.node("a-1")
    assert (node.memory_bytes, node.price_per_hour) == (10 * 2**30, 2.0)
    assert fleet.link("a-0", "a-0").seconds_per_byte == pytest.approx(1 / 3e9)
    assert fleet.link("a-0", "a-1").seconds_per_byte == pytest.approx(1 / 0.5e9)
    assert fleet.link("a-0", "a-1").latency_s == pytest.approx(7e-6)
    assert fleet.link("a-0", "a-1").curves
    v100 = NodeEntry(name="b", device="V100-16", gpus=2)
    plain = Fleet(Cluster(node=(v100,), network=Network(inter_GBps=9.0)), _profile())
    assert plain.node("b").memory_bytes == catalog.device("V100-16").memory_bytes
    assert plain.link("b", "b").seconds_per_byte == pytest.approx(1 / 150e9)


def _blocks(*rows: tuple[int, int, int]) -> ModelSpec:
    """Blocks of (parameters, activation bytes, output bytes)."""
    blocks = [
        BlockSpec(kind="layer", parameters=p, activation_bytes=a, output_bytes=o, flops=1.0)
        for p, a, o in rows
    ]
    sizes = ParameterBytes(weight=4, gradient=4, optimizer=8)
    return ModelSpec(name="m", sequence=1, blocks=tuple(blocks), bytes_per_parameter=sizes)


def _profile(communication=TpCommunication.INCLUDED, updates=True, activation_bytes=None) -> Profile:
    timings = [
        BlockTiming(
            kind="layer",
            device=d,
            tp=tp,
            samples=n,
            forward_s=1.0,
            backward_s=2.0,
            activation_bytes=activation_bytes,
        )
        for d in ("V100-16", "cpu")
        for n in (1, 2, 4)
        for tp in (1, 2)
    ]
    steps = [
        UpdateTiming(kind="layer", device=d, tp=tp, update_s=0.5) for d in ("V100-16", "cpu") for tp in (1, 2)
    ]
    return Profile(
        model="m",
        sequence=1,
        tp_communication=communication,
        timings=tuple(timings),
        updates=tuple(steps) if updates else (),
    )


def _tables(model: ModelSpec, profile: Profile, device: str = "V100-16") -> Tables:
    cluster = Cluster(node=(NodeEntry(name="v", device=device, gpus=2),), network=Network(inter_GBps=1.0))
    return Tables(model, profile, Fleet(cluster, profile))


def test_memory_of_a_stage_by_hand():
    model = _blocks((1000, 10, 7), (100_000, 5000, 300), (50_000, 4000, 200), (10, 10, 0))
    tables = _tables(model, _profile())
    found = stage_memory(tables, start=1, stop=3, device="V100-16", tp=1, samples=2, held=3)
    assert (found.weights, found.gradients, found.optimizer) == (600_000, 600_000, 1_200_000)
    assert found.activations == 3 * 2 * (5000 + 4000) + 3 * 2 * 200
    assert found.buffers == 2 * 200 + 2 * 200 + 5 * 2 * 7
    assert found.backward == 2 * 2 * 5000  # the larger block's
    assert found.adoption == 600_000 - 2 * 9000
    assert found.total == 2_400_000 + 3 * 2 * 9200 + 870 + 20_000 + 582_000 + 1


def test_recomputation_keeps_the_inputs_and_the_activations_of_one_micro_batch():
    model = _blocks((0, 10, 7), (0, 5000, 300), (0, 4000, 200), (0, 10, 0))
    tables = _tables(model, _profile())
    again = stage_memory(tables, start=1, stop=3, device="V100-16", tp=1, samples=2, held=3, recompute=True)
    assert again.activations == 3 * 2 * 7 + 2 * 9000 + 3 * 2 * 200


def test_zero_one_divides_the_optimizer_among_the_replicas_and_tp_divides_everything():
    tables = _tables(_blocks((1000, 0, 0)), _profile())

    def memory(**fields):
        return stage_memory(tables, start=0, stop=1, device="V100-16", samples=1, held=1, **fields)

    assert memory(tp=1, zero=1, width=4).optimizer == 2000
    assert memory(tp=1, zero=0, width=4).optimizer == 8000
    assert (memory(tp=2).weights, memory(tp=2).optimizer) == (2000, 4000)


def test_measured_activations_win_over_the_model():
    spec = _blocks((0, 5000, 0))
    measured = _tables(spec, _profile(activation_bytes=123))
    assert measured.activations(0, 1, "V100-16", 1, 2) == 123
    assert _tables(spec, _profile()).activations(0, 1, "V100-16", 1, 2) == 10_000


@pytest.mark.parametrize(
    ("kind", "held"), [(ScheduleKind.GPIPE, [8, 8, 8]), (ScheduleKind.ONE_F_ONE_B, [3, 2, 1])]
)
def test_micro_batches_in_flight(kind, held):
    assert [in_flight(kind, s, 3, 8) for s in range(3)] == held
    assert in_flight(kind, 0, 3, 2) == 2


def test_tensor_parallel_communication_is_added_where_the_profile_leaves_it_out():
    model = _blocks(*[(0, 0, 150 * MB)] * 4)
    inside, outside = _tables(model, _profile()), _tables(model, _profile(TpCommunication.EXCLUDED))
    # a ring of two sends half of 150 MB twice at 150 GB/s: 1 ms and two latencies of 10 µs
    once = 2 * (0.5e-3 + 10e-6)
    assert outside.stage_seconds(1, 3, "V100-16", 2, 1)[0] == pytest.approx(2.0 + 2 * 2 * once)
    assert outside.stage_seconds(0, 1, "V100-16", 2, 1)[1] == pytest.approx(2.0 + once)
    assert inside.stage_seconds(1, 3, "V100-16", 2, 1)[0] == pytest.approx(2.0)
    halves = [msgspec.structs.replace(b, tp_collectives=1) for b in model.blocks]  # attention, MLP, ...
    half = _tables(msgspec.structs.replace(model, blocks=tuple(halves)), _profile(TpCommunication.EXCLUDED))
    assert half.stage_seconds(1, 3, "V100-16", 2, 1)[0] == pytest.approx(2.0 + 2 * once)
    assert outside.stage_seconds(1, 3, "V100-16", 1, 1)[0] == pytest.approx(2.0)


def test_an_optimizer_step_that_was_not_measured_is_estimated_and_said():
    tables = _tables(_blocks((900 * MB, 0, 0)), _profile(updates=False))
    assert tables.update_seconds(0, 1, "V100-16", 1) == pytest.approx(3 * 900e6 * 16 / 900e9)
    assert any("optimizer step on V100-16" in note for note in tables.not_measured)
    assert not any("optimizer" in note for note in _tables(_blocks((1, 0, 0)), _profile()).not_measured)


@pytest.mark.parametrize(("device", "busy_s"), [("V100-16", 0.2), ("cpu", 0.025)])
def test_messages_take_time_from_the_computation_of_both_ends(device, busy_s):
    # 100 MB at 0.25 ns a byte on CPUs; a GPU sends in the stream that it computes in
    nodes = NodeEntry(name="n", device=device, gpus=2, intra_GBps=0.5)
    ask = Request(
        cluster=Cluster(node=(nodes,), network=Network(inter_GBps=1.0)),
        model=_blocks((0, 0, 100 * MB), (0, 0, 0)),
        profile=_profile(),
        global_batch=4,
    )
    stages = [Stage(layers=(i, i + 1), replicas=(Replica(devices=(f"n:{i}",), share=1),)) for i in range(2)]
    pipeline = Pipeline(micro_batches=4, micro_batch=1, stages=tuple(stages))
    found = price(Plan(model="m", global_batch=4, sequence=1, pipelines=(pipeline,)), ask)
    assert isinstance(found, Estimate)
    first, second = ({s.name: s for s in found.timeline[f"n:{i}"]} for i in range(2))
    assert second["1F2"].end_s - second["1F2"].start_s == pytest.approx(1 + busy_s, abs=2e-4)
    assert first["0B2"].end_s - first["0B2"].start_s == pytest.approx(2 + busy_s, abs=2e-4)
    assert first["0F1"].start_s - first["0F0"].end_s == pytest.approx(busy_s, abs=2e-4)
    # the message itself is there after 0.2 s, whoever works on it
    assert second["1F0"].end_s - first["0F0"].end_s == pytest.approx(1.2, abs=1e-3)


def test_links_of_a_profile_are_found_in_either_order():
    profile = Profile(
        model="m", sequence=1, timings=_profile().timings,
        links=(LinkTiming(between=("cpu", "V100-16"), scope=LinkScope.INTER,
                          points=(LinkPoint(bytes=MB, seconds=9.0),)),),
    )  # fmt: skip
    nodes = NodeEntry(name="c", device="cpu", gpus=1), NodeEntry(name="v", device="V100-16", gpus=1)
    fleet = Fleet(Cluster(node=nodes, network=Network(inter_GBps=1.0)), profile)
    assert fleet.link("c", "v").seconds(MB) == fleet.link("v", "c").seconds(MB) == 9.0


def test_memory_of_many_stages_at_once_is_that_of_each():
    model = ModelSpec(
        name="m",
        sequence=1,
        blocks=(
            BlockSpec(kind="layer", parameters=900, activation_bytes=10, output_bytes=7, flops=1.0),
            *_blocks((1000, 20, 3), (70, 4000, 2)).blocks,
            BlockSpec(
                kind="layer", parameters=1200, activation_bytes=70, output_bytes=0, flops=1.0,
                tied_to=0, tied_parameters=800,
            ),
        ),
    )  # fmt: skip
    tables = _tables(model, _profile())
    one = {"device": "V100-16", "tp": 2, "samples": 2}
    rows = [
        (start, stop, held, again, zero, width)
        for start, stop in ((0, 2), (0, 4), (1, 4), (2, 3))
        for held, again in ((1, True), (5, False), (5, True))
        for zero, width in ((0, 4), (1, 4))
    ]
    names = ("start", "stop", "held", "recompute", "zero", "width")
    arrays = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    together = stage_memory(tables, **one, **arrays).totals
    alone = [stage_memory(tables, **one, **dict(zip(names, row, strict=True))).total for row in rows]
    assert together.tolist() == alone
