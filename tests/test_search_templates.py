"""The search over templates: exact cuts, closed forms near the price, packings of odd devices, placement."""

from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry, node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.rules import check_plan
from planner import catalog
from planner.cost import Estimate, price
from planner.request import Request
from planner.search import Enumeration, find_plan
from planner.search.assemble import alike, even_takes, plan_of
from planner.search.batch import Templates
from planner.search.broad import Broad
from planner.search.columns import Completion
from planner.search.held import Held, Option
from planner.search.judge import Judge
from planner.search.min_max import Stages, min_max_cuts
from planner.search.moves import lines_of, neighbours
from planner.search.pack import pack
from planner.search.propose import _fastest
from planner.search.refine import option_moves
from planner.search.supply import Supply, use_of


def request_of(*nodes, model="opt-350m", global_batch=64, inter=12.5, **more):
    """``nodes``: (name, device, gpus, count)."""
    entries = tuple(NodeEntry(name=n, device=d, gpus=g, count=c) for n, d, g, c in nodes)
    spec = catalog.model(model) if isinstance(model, str) else model
    return Request(
        cluster=Cluster(node=entries, network=Network(inter_GBps=inter)),
        model=spec,
        profile=catalog.profile_for(spec, list(dict.fromkeys(d for _, d, _, _ in nodes))),
        global_batch=global_batch,
        **more,
    )


MIXED = (("a", "A100-40", 4, 2), ("v", "V100-16", 4, 2))


def completion_of(request, kind=ScheduleKind.ONE_F_ONE_B):
    return Completion(request, Supply.of(request), kind)


# --- rows


@pytest.mark.parametrize("share", [65_535, 65_536])
def test_a_stage_may_take_the_largest_global_batch(share):
    request = request_of(("a", "A100-40", 2, 1), global_batch=65_536)
    rows = tuple(
        msgspec.structs.replace(row, samples=share, forward_s=9.0, backward_s=9.0)
        for row in request.profile.timings
        if row.samples == 1
    )
    timings = (*request.profile.timings, *rows)
    request = replace(request, profile=msgspec.structs.replace(request.profile, timings=timings))
    rows = completion_of(request).rows
    one, none = np.array([1]), np.array([0])
    found = rows.of(none, one, np.array([share]), one, one)
    assert found.tolist() == [0]
    assert rows.seconds[0][0].tolist() == list(request.tables.costs("A100-40", 1, share).forward_s)


def test_what_no_cluster_holds_has_no_row():
    rows = completion_of(request_of(*MIXED)).rows
    likely = {"pool": 0, "tp": 1, "share": 1, "width": 1, "tile": 1}
    for name, wrong in (("pool", 2), ("tp", 17), ("share", 65), ("width", 0), ("tile", 17)):
        parts = {n: np.array([v]) for n, v in (likely | {name: wrong}).items()}
        assert rows.of(**parts).tolist() == [-1], name
    assert rows.of(**{n: np.array([v]) for n, v in likely.items()}).tolist() == [0]


# --- cuts


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_cuts_are_those_of_all_cuts(rng):
    """Random speeds and memories of up to four stages, against every cut there is."""
    length, rows = rng.randint(2, 7), 3
    times = np.array([[0.0, *np.cumsum([rng.uniform(0.1, 2) for _ in range(length)])] for _ in range(rows)])
    again = times * 1.4
    stops, stops_again = [], []
    for _ in range(rows):
        plain = np.minimum(
            length, np.arange(length + 1) + [rng.randint(0, length) for _ in range(length + 1)]
        )
        plain = np.maximum.accumulate(plain)
        stops.append(plain)
        stops_again.append(np.minimum(length, plain + rng.randint(0, 2)))
    depth = rng.randint(1, min(4, length))
    row = np.array([[rng.randrange(rows) for _ in range(4)]])
    stages = Stages(
        row=row,
        reach=row,
        depth=np.array([depth]),
        times=times,
        again=again,
        stops=np.array(stops),
        stops_again=np.array(stops_again),
    )
    found = min_max_cuts(stages)

    def stage_s(r, i, j):
        if stops[r][i] >= j:
            return times[r][j] - times[r][i]
        return again[r][j] - again[r][i] if stops_again[r][i] >= j else np.inf

    cuts = [(0, *c, length) for c in combinations(range(1, length), depth - 1)]
    best = min(max(stage_s(row[0, s], c[s], c[s + 1]) for s in range(depth)) for c in cuts)
    assert found.slowest_s[0] == pytest.approx(best)
    if np.isfinite(best):
        bounds = found.bounds[0]
        own = max(stage_s(row[0, s], bounds[s], bounds[s + 1]) for s in range(depth))
        assert own == pytest.approx(best)


def test_pipelines_are_cut_together_as_alone():
    """Of all depths, with blocks that only some stages can hold, so that greedy walks get stuck."""
    rng = np.random.default_rng(0)
    length, rows, number, most = 14, 3, 60, 9
    weights = rng.uniform(0.2, 1.0, length) * np.where(rng.random(length) < 0.3, 5, 1)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    stops = np.array([np.searchsorted(before, before + room, side="right") - 1 for room in (4.0, 6.0, 9.0)])
    times = np.cumsum(np.pad(rng.uniform(0.1, 2, (rows, length)), ((0, 0), (1, 0))), axis=1)
    row = rng.integers(0, rows, (number, most))
    depth = rng.integers(1, most + 1, number)

    def cut(chosen):
        return min_max_cuts(
            Stages(
                row=row[chosen],
                reach=row[chosen],
                depth=depth[chosen],
                times=times,
                again=1.3 * times,
                stops=stops,
                stops_again=np.minimum(stops + 1, length),
            )
        )

    together = cut(np.arange(number))
    alone = [cut(np.array([k])) for k in range(number)]
    good = np.isfinite(together.slowest_s)
    assert 10 < good.sum() < number
    assert together.slowest_s.tolist() == [found.slowest_s[0] for found in alone]
    assert together.bounds[good].tolist() == [alone[k].bounds[0].tolist() for k in np.nonzero(good)[0]]


def test_what_fits_in_flight_is_what_the_price_lets_through():
    request = request_of(*MIXED)
    held, options = Held(request.tables), (Option(False, 0), Option(True, 0), Option(False, 1))
    node = request.fleet.node("v-0")
    room = node.memory_bytes - node.device.reserve_bytes
    tables = held.most(options, device="V100-16", tp=1, samples=2, room_bytes=room, width=2)
    from planner.cost import stage_memory

    for option, table in zip(options, tables, strict=True):
        for start, stop in ((0, 1), (0, 4), (3, 9), (20, 26)):
            peaks = [
                stage_memory(
                    request.tables,
                    start=start,
                    stop=stop,
                    device="V100-16",
                    tp=1,
                    samples=2,
                    held=n,
                    recompute=option.recompute,
                    zero=option.zero,
                    width=2,
                ).total
                for n in range(64)
            ]
            assert min(table[start, stop], 63) == sum(peak <= room for peak in peaks) - (peaks[0] <= room)


# --- closed forms


@pytest.mark.parametrize("nodes", [MIXED, (("a", "A100-40", 4, 4), ("h", "H100", 8, 2))])
def test_the_closed_form_is_near_the_price(nodes):
    request = request_of(*nodes, model="opt-350m", global_batch=256)
    completion = completion_of(request)
    columns = completion.columns(Enumeration().templates(completion, 600))
    ratios = []
    for k in np.argsort(columns.seconds, kind="stable")[:40]:
        part = alike(columns, int(k), request.global_batch)
        plan = plan_of(completion, [part], by_stage=bool(columns.by_stage[k]))
        outcome = price(plan, request)
        assert isinstance(outcome, Estimate)
        ratios.append(outcome.iteration_s / columns.seconds[k])
    assert np.median(ratios) == pytest.approx(1.0, abs=0.02)
    assert min(ratios) > 0.9
    assert max(ratios) < 1.2


# --- numbers


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 400), st.integers(1, 12))
def test_takes_make_the_global_batch(copies, size, samples, least):
    takes = even_takes(copies, size, samples, least)
    if takes is not None:
        assert len(takes) == copies
        assert sum(count * each for count, each in takes) == samples
        assert all(count >= 1 and each >= min(least, size) for count, each in takes)
    else:
        assert samples // size < copies or samples % size


def test_a_size_that_is_the_least_there_is_leaves_its_rest_to_larger_ones():
    takes = even_takes(4, 3, 512, 3)
    assert takes is not None
    assert sum(count * size for count, size in takes) == 512
    assert [size for _, size in takes[:3]] == [3, 3, 3]
    assert max(-(-size // 3) * count for count, size in takes) < 1.2 * 512 / 12


def test_columns_that_cannot_make_the_batch_hide_no_others():
    """97 samples are no multiple of any micro-batch of two to five: no pair of replicas alone takes them."""
    request = request_of(("a", "A100-40", 8, 4), global_batch=97)

    class Impossible:
        name = "impossible"

        def batches(self, completion, seed):
            wide = [([(0, 1, 2, 1)] * depth, 1, 2) for depth in range(2, 16)]
            wide += [([(0, 1, 4, 1)] * depth, 1, 4) for depth in range(1, 8)]
            wide += [([(0, 2, 2, 1)] * depth, 1, 2) for depth in range(1, 8)]
            wide += [([(0, 1, 2, 1)] * depth + [(0, 2, 2, 1)] * 2, 1, 2) for depth in range(1, 12)]
            yield Templates.of([*wide, ([(0, 1, 1, 1)] * 2, 1, 1)])

    judge = Judge(request, None, 3)
    Broad(judge, Supply.of(request), ScheduleKind.ONE_F_ONE_B, (Impossible(),)).start()
    assert judge.kept


def test_six_types_in_nodes_of_unlike_sizes_have_a_plan():
    nodes = (
        ("a", "A100-40", 4, 6),
        ("b", "A6000", 1, 8),
        ("c", "RTX-3090", 2, 7),
        ("d", "V100-16", 8, 3),
        ("e", "T4", 4, 9),
        ("f", "L4", 1, 5),
    )
    spec = catalog.model("gpt-neo-2.7b", sequence=2048, dtype="bfloat16")
    request = request_of(*nodes, model=spec, global_batch=512)
    found = find_plan(request, evaluations=4, peers=())
    assert check_plan(found.plan, cluster=request.cluster, model=request.model) == ()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.sampled_from([1, 2, 4]), max_size=9))
def test_the_limits_are_exact_for_powers_of_two(sizes, groups):
    """Groups keep to the limits just when a first-fit of the largest first seats them all."""
    nodes = [(f"n{i}", "A100-40", size, 1) for i, size in enumerate(sizes)]
    request = request_of(*nodes)
    supply = Supply.of(request)
    (pool,) = supply.pools
    groups = [g for g in groups if g in pool.degrees]
    line = Templates.of([([(0, tp, 1, 1) for tp in groups], 1, 1)])
    use = use_of(supply.limits, line.pool, line.tp, line.width)[0]
    fits = all(u <= limit.places for u, limit in zip(use, supply.limits, strict=True))
    free = list(sizes)
    seated = True
    for tp in sorted(groups, reverse=True):
        at = next((i for i, n in enumerate(free) if n >= tp), None)
        seated = seated and at is not None
        if at is not None:
            free[at] -= tp
    assert fits == seated


def test_moves_change_one_thing_and_come_back():
    line = (((0, 1, 2, 1), (0, 1, 2, 1), (1, 2, 1, 1)), 4, 8)
    found = set(neighbours(line, (1, 2, 4), 2))
    assert line not in found or len(found) > 30
    assert (((1, 2, 1, 1), (0, 1, 2, 1), (0, 1, 2, 1)), 4, 8) in found  # swapped
    assert (((0, 1, 2, 1), (1, 2, 1, 1)), 4, 8) in found  # a stage less
    assert (((0, 2, 1, 1), (0, 2, 1, 1), (1, 2, 1, 1)), 4, 8) in found  # TP for width
    assert (((0, 1, 4, 1), (0, 1, 4, 1), (1, 2, 2, 1)), 2, 16) in found  # width for copies


# --- sources


def test_an_enumeration_in_batches_is_the_whole_one_smallest_first():
    completion = completion_of(request_of(*MIXED))
    whole = Enumeration().templates(completion, 2400)
    batches = list(Enumeration().batches(completion, 0))
    assert len(batches[0]) < len(batches[-1])
    assert len(batches[0]) <= 64
    assert lines_of(Templates.joined(batches)) == lines_of(whole)


def test_a_plan_is_there_before_the_last_batch():
    """Under a clock the best of each batch is priced before the next is asked for."""
    request = request_of(*MIXED)
    judge = Judge(request, 60.0, None)
    priced_before = []

    class Watched:
        name = "watched"

        def batches(self, completion, seed):
            for batch in Enumeration().batches(completion, seed):
                priced_before.append(judge.evaluations)
                yield batch

    Broad(judge, Supply.of(request), ScheduleKind.ONE_F_ONE_B, (Watched(),)).start()
    assert priced_before[0] == 0
    assert priced_before[1] > 0


def test_ways_of_very_large_tensor_parallel_groups_are_told_apart():
    """Two of each TP degree come first, for every pair of copies and micro-batch by itself."""
    pair, tp = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1]), np.array([1, 513, 513, 513, 1, 2, 2, 2, 1])
    speed = np.array([0.0, 9.0, 8.0, 7.0, 0.0, 3.0, 2.5, 2.0, 1.0])
    found = _fastest(pair, tp, speed, speed == 0, 4)
    assert found.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]


# --- packing


def test_odd_nodes_are_packed_with_unlike_pipelines():
    """Seven devices that no single template divides: two unlike pipelines beat leaving some idle."""
    request = request_of(("a", "A100-40", 4, 1), ("b", "A100-40", 3, 1), model="opt-1.3b", global_batch=48)
    found = find_plan(request, evaluations=60, peers=())
    assert found.idle == ()
    assert sum(p.micro_batches * p.micro_batch for p in found.plan.pipelines) == 48
    assert check_plan(found.plan, cluster=request.cluster, model=request.model) == ()


def test_a_packing_keeps_to_devices_and_batch():
    request = request_of(
        ("a", "A100-40", 4, 1), ("a1", "A100-40", 1, 3), ("v", "V100-16", 4, 2), global_batch=97
    )
    completion = completion_of(request)
    columns = completion.columns(Enumeration().templates(completion, 400))
    single, packings = pack(completion, columns, 2 * float(columns.seconds.min()))
    assert packings
    for packing in packings:
        assert sum(n * b for _, takes in packing.columns for n, b in takes) == 97
        use = sum(
            len(takes)
            * use_of(
                completion.supply.limits,
                single.templates.pool[[k]],
                single.templates.tp[[k]],
                single.templates.width[[k]],
            )[0]
            for k, takes in packing.columns
        )
        assert (use <= [limit.places for limit in completion.supply.limits]).all()
    assert packings[0].seconds == min(p.seconds for p in packings)


def test_devices_that_do_not_pay_stay_idle():
    """A device a hundred times slower than the rest only holds them up."""
    request = request_of(("a", "A100-40", 4, 1), ("v", "V100-16", 1, 1), global_batch=16)
    timings = tuple(
        msgspec.structs.replace(t, forward_s=100 * t.forward_s, backward_s=100 * t.backward_s)
        if t.device == "V100-16"
        else t
        for t in request.profile.timings
    )
    slow = msgspec.structs.replace(request.profile, timings=timings)
    found = find_plan(
        Request(cluster=request.cluster, model=request.model, profile=slow, global_batch=16),
        evaluations=30,
        peers=(),
    )
    assert found.idle == ("v:0",)


def test_tensor_parallel_groups_stay_in_nodes_of_any_size():
    request = request_of(
        ("a", "A100-40", 8, 1),
        ("b", "A100-40", 4, 2),
        ("c", "A100-40", 1, 3),
        model="llama-3-8b",
        global_batch=64,
    )
    found = find_plan(request, evaluations=40, peers=())
    for pipeline in found.plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                assert len({node_of(device) for device in replica.devices}) == 1
    assert check_plan(found.plan, cluster=request.cluster, model=request.model) == ()


def test_zero_makes_room_where_it_may():
    """What ZeRO may do is the request's to say; with it no plan is slower."""
    nodes = (("v", "V100-16", 4, 1),)
    tight = request_of(*nodes, model="opt-1.3b", global_batch=16, max_zero=1)
    plans = [find_plan(tight, evaluations=40, peers=())]
    assert any(stage.zero == 1 for found in plans for p in found.plan.pipelines for stage in p.stages)
    without = find_plan(request_of(*nodes, model="opt-1.3b", global_batch=16), evaluations=40, peers=())
    assert all(stage.zero == 0 for p in without.plan.pipelines for stage in p.stages)
    assert plans[0].estimate.iteration_s <= without.estimate.iteration_s * 1.001


def test_experts_are_tiled_where_one_device_cannot_hold_them():
    request = request_of(("a", "A100-80", 4, 4), ("h", "H100", 4, 4), model="mixtral-8x7b", global_batch=64)
    found = find_plan(request, evaluations=12, peers=())
    tiles = {s.expert_parallel * s.expert_tensor for p in found.plan.pipelines for s in p.stages}
    assert max(tiles) > 1
    assert check_plan(found.plan, cluster=request.cluster, model=request.model) == ()


def test_zero_and_tilings_are_moved_for_all_alike_pipelines():
    request = request_of(("a", "A100-80", 4, 4), model="mixtral-8x7b", global_batch=64, max_zero=1)
    plan = find_plan(request, evaluations=3, peers=()).plan
    moved = list(option_moves(plan, request))
    assert moved
    for other in moved:
        assert check_plan(other, cluster=request.cluster, model=request.model) == ()
        assert other != plan
        assert [p.micro_batches for p in other.pipelines] == [p.micro_batches for p in plan.pipelines]
        changed = [
            [(s.zero, s.expert_parallel, s.expert_tensor) for s in p.stages]
            for p, own in zip(other.pipelines, plan.pipelines, strict=True)
            if p != own
        ]
        assert changed


def test_a_tiling_is_moved_where_all_alike_pipelines_can_have_it():
    request = request_of(("a", "A100-80", 4, 2), model="mixtral-8x7b", global_batch=8)

    def pipeline(*seats):
        stage = Stage(
            layers=(0, len(request.model.blocks)),
            replicas=tuple(Replica(devices=seat, share=1) for seat in seats),
        )
        return Pipeline(micro_batches=2, micro_batch=2, stages=(stage,))

    wide = pipeline(("a-0:0", "a-0:1"), ("a-0:2", "a-0:3"))
    plan = Plan(
        model=request.model.name,
        global_batch=8,
        sequence=request.model.sequence,
        pipelines=(wide, pipeline(("a-1:0",), ("a-1:1",))),
    )
    moved = list(option_moves(plan, request))
    assert moved
    for other in moved:
        assert check_plan(other, cluster=request.cluster, model=request.model) == ()


def test_other_schedules_are_searched_too():
    nodes = (("a", "A100-40", 4, 2), ("v", "V100-16", 4, 2))
    one = find_plan(request_of(*nodes, global_batch=32), evaluations=20, peers=())
    kinds = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)
    both = find_plan(request_of(*nodes, global_batch=32, schedules=kinds), evaluations=40, peers=())
    assert both.estimate.iteration_s <= one.estimate.iteration_s
    zero = find_plan(
        request_of(*nodes, global_batch=32, schedules=(ScheduleKind.ZERO_BUBBLE,)), evaluations=20, peers=()
    )
    assert zero.plan.schedule is ScheduleKind.ZERO_BUBBLE


def test_the_same_columns_whatever_else_was_completed():
    """What a completion remembers changes nothing."""
    request = request_of(*MIXED)
    fresh, used = completion_of(request), completion_of(request)
    templates = Enumeration().templates(fresh, 60)
    used.columns(Enumeration().templates(used, 400))
    a, b = fresh.columns(templates), used.columns(templates)
    assert (a.bounds == b.bounds).all()
    assert (a.seconds == b.seconds).all()


def test_a_mixture_of_unlike_pipelines_wins_where_no_single_template_does():
    """Four fast devices beside twelve slow ones: by the closed form a mixture is best."""
    request = request_of(("v", "V100-16", 4, 3), ("h", "H100", 4, 1), global_batch=256)
    completion = completion_of(request)
    columns = completion.columns(Enumeration().templates(completion, 2400))
    best = columns.take(np.argsort(columns.seconds, kind="stable")[:800])
    _, packings = pack(completion, best, 1.1 * float(best.seconds.min()))
    assert len(packings[0].columns) > 1
    assert packings[0].seconds < float(best.seconds.min())


def test_slow_hops_weigh_when_templates_are_ranked():
    """By compute alone deep pipelines of single devices look best; two neighbours then wait for messages."""
    nodes = [("a", "A100-40", 4, 31)]
    nodes += [(n, d, 4, 32) for n, d in (("b", "A100-80"), ("v", "V100-16"), ("r", "RTX-3090"))]
    request = request_of(*nodes, global_batch=1024)
    completion = completion_of(request)
    best = [completion.columns(batch).seconds.min() for batch in Enumeration().batches(completion, 0)]
    # one stage of each of three types, four devices wide: ranked without hops the best was 1.93 s
    wide = Templates.of([([(0, 4, 1, 1), (1, 4, 1, 1), (3, 4, 1, 1)], 29, 4)])
    assert min(best) <= 1.1 * completion.columns(wide).seconds.min()
