"""Measured runs correct a profile: known factors come back, outliers do not count, guesses are marked."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.profile import (
    BlockTiming,
    LinkPoint,
    LinkScope,
    LinkTiming,
    Profile,
    Source,
    StepTiming,
    TpCommunication,
    UpdateTiming,
)
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.plan.rules import check_profile
from planner.feedback import Figure, Part, correct
from tests.recorded import plan_of, priced_s, run_of
from tests.strategies import problems

KINDS = ("embedding", *("layer",) * 4, "head")
SECONDS = {"embedding": (0.001, 0.002), "layer": (0.02, 0.04), "head": (0.01, 0.015)}
SLOWNESS = {"cpu-0.8": 1.0, "cpu-0.4": 2.0, "cpu-0.2": 4.0}
MODEL = ModelSpec(
    name="m",
    sequence=16,
    blocks=tuple(
        BlockSpec(kind=kind, parameters=250_000, activation_bytes=100, output_bytes=1000, flops=1e6)
        for kind in KINDS
    ),
)
CLUSTER = Cluster(
    node=(
        NodeEntry(name="a", device="cpu-0.8", gpus=1),
        NodeEntry(name="b", device="cpu-0.4", gpus=1),
        NodeEntry(name="c", device="cpu-0.2", gpus=4),
    ),
    network=Network(inter_GBps=1.0),
)
ONE_STAGE = plan_of([((0, 6), {"a:0": 16, "b:0": 8, "c:0": 4, "c:1": 4, "c:2": 4, "c:3": 4})], 2, MODEL)
PIPELINE = plan_of(
    [((0, 3), {"a:0": 8}), ((3, 4), {"b:0": 8}), ((4, 5), {"c:0": 8}), ((5, 6), {"c:1": 8})], 8, MODEL
)


def profile(factor=lambda kind, device, part: 1.0, *, source=Source.MEASURED, samples=(1, 8, 64)):
    timings = tuple(
        BlockTiming(
            kind=kind,
            device=device,
            samples=n,
            forward_s=n * slowness * forward_s * factor(kind, device, Part.FORWARD),
            backward_s=n * slowness * backward_s * factor(kind, device, Part.BACKWARD),
            source=source,
        )
        for kind, (forward_s, backward_s) in SECONDS.items()
        for device, slowness in SLOWNESS.items()
        for n in samples
    )
    updates = tuple(
        UpdateTiming(
            kind=kind, device=device, update_s=0.01 * slowness * factor(kind, device, Part.UPDATE),
            source=source,
        )
        for kind in SECONDS
        for device, slowness in SLOWNESS.items()
    )  # fmt: skip
    steps = tuple(StepTiming(device=d, step_s=0.004 * slowness) for d, slowness in SLOWNESS.items())
    return Profile(model="m", sequence=16, timings=timings, updates=updates, steps=steps)


def drawn(seed, *, device=0.5, kind=0.12, own=0.02):
    """Factors by device type and block kind, as far off as the prior thinks."""
    generator = np.random.default_rng(seed)
    logs = {name: generator.normal(0, device) for name in SLOWNESS}
    logs |= {name: generator.normal(0, kind) for name in SECONDS}
    own_logs = {(k, d, p): generator.normal(0, own) for k in SECONDS for d in SLOWNESS for p in Part}
    return lambda k, d, p: math.exp(logs[k] + logs[d] + own_logs[k, d, p])


def unlike(kind, device, part):
    """Types and kinds that are off in opposite directions."""
    by_type = {"cpu-0.8": 1.5, "cpu-0.4": 0.6, "cpu-0.2": 1.4}
    by_kind = {"embedding": 1.2, "layer": 0.95, "head": 1.2}
    return by_type[device] * by_kind[kind]


def run(plan, truth, **how):
    return run_of(plan, CLUSTER, MODEL, truth, **how)


GOOD = run(PIPELINE, profile(), steps=4)


def by_figure(correction):
    return {Figure(f.kind, f.device, f.tp, f.part): f for f in correction.factors}


def layer(correction, device, part=Part.FORWARD):
    return by_figure(correction)[Figure("layer", device, 1, part)]


# --- known factors come back


def test_known_factors_are_recovered_within_their_intervals():
    inside = total = 0
    for seed in range(12):
        factor = drawn(seed)
        found = correct(profile(), [run(p, profile(factor), seed=seed) for p in (ONE_STAGE, PIPELINE)])
        for f in found.factors:
            total += 1
            inside += f.low <= factor(f.kind, f.device, f.part) <= f.high
    assert total == 12 * 27
    assert inside / total >= 0.95


def test_the_part_that_takes_most_of_the_time_is_known_well():
    factor = drawn(3)
    found = correct(profile(), [run(PIPELINE, profile(factor))])
    for device in SLOWNESS:
        for part in (Part.FORWARD, Part.BACKWARD):
            truth = factor("layer", device, part)
            assert layer(found, device, part).factor == pytest.approx(truth, rel=0.04)
            assert layer(found, device, part).deviation < 0.06


@pytest.mark.parametrize(("first", "second"), [(ONE_STAGE, PIPELINE), (PIPELINE, ONE_STAGE)])
def test_the_price_of_another_plan_is_right_after_one_run(first, second):
    truth = profile(unlike)
    before, after = profile(), correct(profile(), [run(first, truth)]).profile
    true_s = priced_s(second, CLUSTER, MODEL, truth)
    assert abs(priced_s(second, CLUSTER, MODEL, before) / true_s - 1) > 0.15
    assert priced_s(second, CLUSTER, MODEL, after) == pytest.approx(true_s, rel=0.05)


def test_a_right_profile_stays_as_it_is():
    found = correct(profile(), [run(ONE_STAGE, profile()), run(PIPELINE, profile(), seed=1)])
    for f in found.factors:
        assert f.factor == pytest.approx(1.0, abs=0.02)
        assert f.low < 1 < f.high


def test_the_report_tells_prices_before_and_after():
    truth = profile(unlike)
    found = correct(profile(), [run(p, truth, name=n) for p, n in ((ONE_STAGE, "one"), (PIPELINE, "two"))])
    for told in found.report:
        assert told.steps == 6
        assert abs(told.before.error) > 0.15
        assert abs(told.after.error) < 0.03
        assert abs(told.held_out.error) < 0.05  # by the other run alone
        assert told.after.step_error == pytest.approx(abs(told.after.error), abs=1e-3)
    assert [told.run for told in found.report] == ["one", "two"]
    assert correct(profile(), [run(PIPELINE, truth)]).report[0].held_out is None


def test_a_held_out_run_is_priced_by_the_others_alone():
    """One ran while the machine was twice as slow: neither tells what the other took."""
    slow = profile(lambda k, d, p: 2.0)
    found = correct(profile(), [run(PIPELINE, profile(), name="day"), run(PIPELINE, slow, name="night")])
    day, night = found.report
    assert day.held_out.error == pytest.approx(1.0, abs=0.1)
    assert night.held_out.error == pytest.approx(-0.5, abs=0.05)


def test_a_run_and_the_profile_that_it_corrected_agree():
    """Feeding the same run back again changes little."""
    once = correct(profile(), [run(PIPELINE, profile(drawn(2)))])
    twice = correct(once.profile, [run(PIPELINE, profile(drawn(2)))])
    assert all(f.factor == pytest.approx(1.0, abs=0.03) for f in twice.factors)


# --- what a run does not say


def test_one_mixed_stage_gives_the_sum_and_spreads_it():
    """Six ranks hold all blocks: their sum is known, the part of the embedding in it is not."""
    factor = drawn(7)
    found = correct(profile(), [run(ONE_STAGE, profile(factor))])
    for device in SLOWNESS:
        ours = sum(
            count * SECONDS[k][0] * by_figure(found)[Figure(k, device, 1, Part.FORWARD)].factor
            for k, count in (("embedding", 1), ("layer", 4), ("head", 1))
        )
        truth = sum(
            count * SECONDS[k][0] * factor(k, device, Part.FORWARD)
            for k, count in (("embedding", 1), ("layer", 4), ("head", 1))
        )
        assert ours == pytest.approx(truth, rel=0.02)
        vague = by_figure(found)[Figure("embedding", device, 1, Part.FORWARD)]
        assert vague.high / vague.low > 1.5
        assert layer(found, device).high / layer(found, device).low < 1.3


def test_a_kind_that_ran_elsewhere_follows_its_device_type_and_says_how_unsure():
    found = correct(profile(), [run(PIPELINE, profile(lambda k, d, p: 1.5 if d == "cpu-0.4" else 1.0))])
    head = by_figure(found)[Figure("head", "cpu-0.4", 1, Part.FORWARD)]
    assert head.rows == 0
    assert head.factor == pytest.approx(1.5, rel=0.05)
    assert head.high / head.low > 1.4
    assert layer(found, "cpu-0.4").rows == 1


def test_a_device_type_that_did_not_run_keeps_its_rows():
    plan = plan_of([((0, 6), {"a:0": 8, "b:0": 8})], 2, MODEL)
    found = correct(profile(), [run(plan, profile(lambda k, d, p: 1.7))])
    assert {f.device for f in found.factors} == {"cpu-0.8", "cpu-0.4"}
    untouched = [t for t in found.profile.timings if t.device == "cpu-0.2"]
    assert untouched == [t for t in profile().timings if t.device == "cpu-0.2"]


def test_one_step_says_less_than_many():
    truth = profile(lambda k, d, p: 1.4)
    few, many = (correct(profile(), [run(PIPELINE, truth, steps=n)]) for n in (1, 12))
    assert layer(few, "cpu-0.8").deviation > 1.3 * layer(many, "cpu-0.8").deviation
    assert 1 < layer(few, "cpu-0.8").factor < layer(many, "cpu-0.8").factor + 0.01


# --- outliers


def test_stalls_and_first_steps_do_not_count():
    truth = profile(lambda k, d, p: 1.3)

    def times(rank, step, span):
        stalled = step in (4, 7) and rank == 0 and span.name == "0F1"
        return 60.0 if stalled else 20.0 if step < 2 else 1.0

    found = correct(profile(), [run(PIPELINE, truth, times=times)])
    for device in SLOWNESS:
        assert layer(found, device).factor == pytest.approx(1.3, rel=0.03)


def test_a_throttled_rank_among_alike_ones_is_named_and_left_out():
    found = correct(profile(), [run(ONE_STAGE, profile(), times=lambda rank, *_: 1.8 if rank == 3 else 1)])
    assert layer(found, "cpu-0.2").factor == pytest.approx(1.0, abs=0.05)
    assert layer(found, "cpu-0.2").low < 1 < layer(found, "cpu-0.2").high
    named = [note for note in found.notes if "rank 3 (cpu-0.2)" in note]
    assert len(named) == 3  # forward, backward, update
    assert "forward on rank 3 (cpu-0.2) took 1.79 times" in " ".join(named)


def test_of_two_that_disagree_neither_is_believed():
    plan = plan_of([((0, 6), {"a:0": 8, "c:0": 8, "c:1": 8})], 2, MODEL)
    found = correct(profile(), [run(plan, profile(), times=lambda rank, *_: 1.6 if rank == 2 else 1)])
    slow = layer(found, "cpu-0.2")
    assert slow.low < 1.0
    assert slow.high > 1.45
    assert layer(found, "cpu-0.8").factor == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("wrong", [0.03, 6.0, 40.0])
def test_a_profile_that_is_wrong_by_much_is_no_run_of_outliers(wrong):
    found = correct(profile(), [run(ONE_STAGE, profile(lambda k, d, p: wrong))])
    assert not [note for note in found.notes if "counts" in note]
    assert layer(found, "cpu-0.4").factor == pytest.approx(wrong, rel=0.06)


def test_rows_that_scatter_make_figures_less_sure():
    def scattered(rank, step, span):
        return (1.12, 0.9, 1.05, 0.88, 1.1, 0.93)[rank]

    steady, wild = (
        correct(profile(), [run(ONE_STAGE, profile(), times=times)]) for times in (lambda *_: 1.0, scattered)
    )
    assert layer(wild, "cpu-0.2").deviation > 1.3 * layer(steady, "cpu-0.2").deviation


# --- marks


def sources(correction, device="cpu-0.8", kind="layer"):
    return {t.samples: t.source for t in correction.profile.timings if (t.device, t.kind) == (device, kind)}


def test_figures_are_marked_by_how_sure_they_are():
    runs = [run(plan, profile(), seed=i, steps=12) for i, plan in enumerate((PIPELINE, ONE_STAGE))]
    found = correct(profile(samples=(1, 8, 64, 256)), runs)
    assert sources(found) == {
        1: Source.INTERPOLATED,  # three doublings below the shares that ran
        8: Source.MEASURED,
        16: Source.MEASURED,  # a row of its own, since it ran
        64: Source.INTERPOLATED,
        256: Source.INTERPOLATED,
    }
    assert set(sources(found, kind="embedding").values()) == {Source.INTERPOLATED}
    guess = correct(profile(samples=(1, 8, 64, 2048), source=Source.ANALYTIC), runs)
    assert sources(guess)[8] is Source.MEASURED
    assert sources(guess)[64] is Source.INTERPOLATED
    assert sources(guess)[2048] is Source.ANALYTIC  # seven doublings above what ran


def test_an_analytic_profile_becomes_measured_where_it_ran_and_stays_analytic_elsewhere():
    guess = profile(source=Source.ANALYTIC)
    plan = plan_of([((0, 3), {"a:0": 8}), ((3, 6), {"b:0": 8})], 8, MODEL)
    found = correct(guess, [run(plan, profile(lambda k, d, p: 2.0), seed=s, name=str(s)) for s in (1, 2)])
    assert sources(found)[8] is not Source.ANALYTIC
    assert set(sources(found, device="cpu-0.2").values()) == {Source.ANALYTIC}
    assert sources(found, device="cpu-0.4", kind="embedding")[8] is Source.ANALYTIC  # it did not run there


def test_a_tensor_parallel_degree_that_did_not_run_is_less_sure():
    wide = [replace(t, tp=2, forward_s=t.forward_s / 2) for t in profile().timings]
    both = replace(profile(), timings=(*profile().timings, *wide))
    truth = replace(
        both, timings=tuple(replace(t, forward_s=2 * t.forward_s, backward_s=2 * t.backward_s)
                            for t in both.timings)
    )  # fmt: skip
    plan = plan_of([((0, 3), {"c:0": 8}), ((3, 6), {"c:1": 8})], 4, MODEL)
    found = by_figure(correct(both, [run(plan, truth)]))
    one, two = (found[Figure("layer", "cpu-0.2", tp, Part.FORWARD)] for tp in (1, 2))
    assert two.factor == pytest.approx(2.0, rel=0.1)
    assert two.rows == 0
    assert two.deviation > 0.1 > one.deviation


def test_collectives_of_a_tensor_parallel_group_are_not_taken_for_its_blocks():
    wide = tuple(replace(t, tp=2) for t in profile().timings)
    apart = replace(profile(), timings=wide, tp_communication=TpCommunication.EXCLUDED)
    plan = plan_of([((0, 3), {"c:0 c:1": 8}), ((3, 6), {"c:2 c:3": 8})], 4, MODEL)
    entry = replace(CLUSTER.node[2], intra_GBps=2e-4)  # its all-reduces take a good part of the time
    slow = replace(CLUSTER, node=(*CLUSTER.node[:2], entry))
    found = correct(apart, [run_of(plan, slow, MODEL, apart)])
    assert by_figure(found)[Figure("layer", "cpu-0.2", 2, Part.FORWARD)].factor == pytest.approx(1, abs=0.02)


# --- the optimizer, steps, links


def test_updates_that_nobody_measured_are_learnt_from_the_run():
    without = replace(profile(), updates=())
    found = correct(without, [run(ONE_STAGE, profile())])
    rows = {(u.kind, u.device): u.update_s for u in found.profile.updates}
    assert sum(rows[k, "cpu-0.4"] for k in KINDS) == pytest.approx(6 * 0.02, rel=0.03)


def test_what_a_step_costs_beside_its_blocks_is_learnt():
    slower = replace(profile(), steps=tuple(replace(s, step_s=3 * s.step_s) for s in profile().steps))
    found = {s.device: s for s in correct(profile(), [run(ONE_STAGE, slower)]).steps}
    assert 2 < found["cpu-0.2"].after_s / found["cpu-0.2"].before_s < 3.1
    assert found["cpu-0.8"].before_s == 0.004
    unknown = replace(profile(), steps=())
    found = {s.device: s for s in correct(unknown, [run(ONE_STAGE, slower)]).steps}
    assert found["cpu-0.8"].after_s == pytest.approx(3 * 0.016, rel=0.1)


def with_links(seconds_per_byte):
    sizes = (1000, 100_000, 10_000_000)
    links = tuple(
        LinkTiming(
            between=between,
            scope=LinkScope.INTER,
            points=tuple(LinkPoint(bytes=n, seconds=1e-4 + n * seconds_per_byte) for n in sizes),
        )
        for between in (("cpu-0.8", "cpu-0.4"), ("cpu-0.8", "cpu-0.2"), ("cpu-0.4", "cpu-0.2"))
    )
    return replace(profile(), links=links)


def test_links_are_slowed_where_sums_of_gradients_show_it_and_never_made_faster():
    right, fast = with_links(1e-8), with_links(0.4e-8)
    plan = plan_of([((0, 6), {"a:0": 8, "b:0": 8})], 2, MODEL)
    [link] = correct(fast, [run(plan, right)]).links
    assert link.applied
    assert 1.6 < link.factor < 2.5
    [same] = correct(right, [run(plan, fast)]).links
    assert not same.applied
    assert correct(right, [run(plan, fast)]).profile.links == right.links
    slowed = correct(fast, [run(plan, right)]).profile.links
    assert slowed[0].source is Source.INTERPOLATED
    assert slowed[0].points[2].seconds == pytest.approx(link.factor * fast.links[0].points[2].seconds)
    assert slowed[0].points[0] == fast.links[0].points[0]  # sums say nothing of latency
    assert slowed[1:] == fast.links[1:]


def test_links_that_only_the_cluster_file_knows_get_a_point():
    """All pairs of types of the ring, as the file says that they are alike."""
    plan = plan_of([((0, 6), {"a:0": 16, "b:0": 8, "c:0": 4})], 2, MODEL)
    slow = replace(CLUSTER, network=Network(inter_GBps=0.05))
    found = correct(profile(), [dataclasses.replace(run_of(plan, slow, MODEL, profile()), cluster=CLUSTER)])
    assert {(link.between, link.applied) for link in found.links} == {
        (pair, True) for pair in (("cpu-0.2", "cpu-0.4"), ("cpu-0.2", "cpu-0.8"), ("cpu-0.4", "cpu-0.8"))
    }
    [told] = found.report
    assert abs(told.after.error) < 0.5 * abs(told.before.error)
    inside = plan_of([((0, 6), {"a:0": 16, "c:0": 4, "c:1": 4})], 2, MODEL)  # a node's own links are slower
    [link] = correct(profile(), [run(inside, profile())]).links
    assert (link.between, link.scope) == (("cpu-0.2", "cpu-0.2"), LinkScope.INTRA)


# --- what is refused, what is skipped


def test_runs_that_say_nothing_are_refused_with_reasons():
    with pytest.raises(UsageError, match="no runs"):
        correct(profile(), [])
    other = replace(profile(), model="other")
    with pytest.raises(
        UsageError, match="run: left out: its plan is for model 'm', and the profile measures"
    ):
        correct(other, [run(PIPELINE, profile())])
    empty = run(PIPELINE, profile())
    with pytest.raises(UsageError, match="hold no whole step"):
        correct(profile(), [dataclasses.replace(empty, records=())])
    elsewhere = Cluster(node=CLUSTER.node[:1], network=CLUSTER.network)
    with pytest.raises(UsageError, match="the cluster has no node"):
        correct(profile(), [dataclasses.replace(empty, cluster=elsewhere)])


def test_a_bad_run_does_not_spoil_a_good_one():
    good, bad = run(PIPELINE, profile(), name="good"), run(PIPELINE, profile(), name="bad")
    bad = dataclasses.replace(bad, records=())
    found = correct(profile(), [bad, good])
    assert [told.run for told in found.report] == ["good"]
    assert found.notes[0].startswith("bad: left out: ")


def test_strange_records_are_counted_and_left_out():
    good = run(PIPELINE, profile())
    action = next(r for r in good.records if r.kind is RecordKind.ACTION and r.step == 5)
    strange = [
        replace(action, rank=99),
        replace(action, name="7F0"),
        replace(action, name="what"),
        replace(action, samples=0),
        replace(action, compute_s=math.nan),
        replace(action, compute_s=-1.0),
        replace(action, compute_s=math.inf),
        replace(action, compute_s=1e308),
        replace(action, samples=4096),
    ]
    found = correct(profile(), [dataclasses.replace(good, records=(*good.records, *strange))])
    said = "\n".join(found.notes)
    assert "4 records of ranks or stages that the plan does not have" in said
    assert "4 records with times that no clock gives" in said
    assert "was not measured for 4096 samples" in said
    assert found.profile == correct(profile(), [good]).profile


def test_stages_whose_price_holds_more_than_blocks_are_left_out():
    stage = replace(ONE_STAGE.pipelines[0].stages[0], zero=1)
    plan = replace(ONE_STAGE, pipelines=(replace(ONE_STAGE.pipelines[0], stages=(stage,)),))
    with pytest.raises(UsageError, match="ZeRO"):
        correct(profile(), [run(plan, profile())])


def test_recomputation_and_split_backwards_are_understood():
    stages = tuple(replace(s, recompute=True) for s in PIPELINE.pipelines[0].stages)
    again = replace(PIPELINE, pipelines=(replace(PIPELINE.pipelines[0], stages=stages),))
    split = replace(PIPELINE, schedule=ScheduleKind.ZERO_BUBBLE)
    truth = profile(lambda k, d, p: 1.2 if p is Part.BACKWARD else 1.5)
    for plan in (again, split):
        found = correct(profile(), [run(plan, truth)])
        assert layer(found, "cpu-0.8", Part.FORWARD).factor == pytest.approx(1.5, rel=0.05)
        assert layer(found, "cpu-0.8", Part.BACKWARD).factor == pytest.approx(1.2, rel=0.05)


# --- for any plan


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(types=("A100-40", "V100-16")), data=st.data())
def test_whatever_ran_the_corrected_profile_is_valid_and_no_worse(problem, data):
    plan, request = problem
    scale = data.draw(st.floats(0.3, 3.0))
    truth = replace(
        request.profile,
        timings=tuple(
            replace(t, forward_s=scale * t.forward_s, backward_s=scale * t.backward_s)
            for t in request.profile.timings
        ),
    )
    ran = run_of(plan, request.cluster, request.model, truth, noise=data.draw(st.floats(0, 0.2)), steps=3)
    found = correct(request.profile, [ran])
    assert not check_profile(found.profile)
    assert all(0 < f.low <= f.factor <= f.high < math.inf for f in found.factors)
    if abs(math.log(scale)) > 0.5:
        [told] = found.report
        assert abs(told.after.error) < abs(told.before.error) + 0.02


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_record_can_bring_it_down(data):
    """Whatever files hold: an answer that is a profile, or an error of ours."""
    seconds = st.one_of(st.floats(), st.sampled_from((0.0, 1e-300, 1e-9, 1.0, 1e6, 1e308)))
    times = st.fixed_dictionaries({"compute_s": seconds, "wait_s": seconds, "transfer_s": seconds})
    others = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(RecordKind),
            "name": st.sampled_from(("0F0", "1B3", "3W0", "2I1", "0:6", "update", "step", "", "9F9")),
            "rank": st.integers(-1, 5),
            "step": st.integers(-1, 9),
            "samples": st.sampled_from((-1, 0, 1, 3, 8, 64, 65, 2**70)),
        }
    )
    good = GOOD.records if data.draw(st.booleans()) else ()
    drawn = data.draw(st.lists(st.builds(lambda a, b: {**a, **b}, times, others), max_size=12))
    strange = tuple(replace(GOOD.records[0], **fields) for fields in drawn)
    try:
        found = correct(profile(), [dataclasses.replace(GOOD, records=(*good, *strange))])
    except UsageError:
        assert not good
        return
    assert not check_profile(found.profile)
    assert all(0 < f.low <= f.factor <= f.high < math.inf for f in found.factors)


def test_the_order_of_runs_and_records_does_not_matter():
    runs = [run(PIPELINE, profile(drawn(1)), name="a"), run(ONE_STAGE, profile(drawn(1)), name="b", seed=4)]
    turned = [dataclasses.replace(r, records=r.records[::-1]) for r in reversed(runs)]
    one, two = correct(profile(), runs), correct(profile(), turned)
    assert [f.factor for f in one.factors] == pytest.approx([f.factor for f in two.factors], rel=1e-7)
