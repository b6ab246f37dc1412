"""Every rival strategy passes one contract; each then has its own rules."""

import random
import time
from contextlib import suppress
from itertools import accumulate, combinations, pairwise
from math import inf
from typing import ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.rules import check_plan
from planner import catalog
from planner.cost import Estimate, price
from planner.cuts import least_slowest, least_slowest_of_every_depth
from planner.exhaustive import Limits, random_request
from planner.peers import PEERS, Amp, Espresso, Even, HexiScale, Metis, Sailor, Strategy, Uniform
from planner.peers.hexiscale import Division, Partition, Scheduler
from planner.peers.metis import orders, sums
from planner.peers.rough_cuts import even_layers, in_proportion, runs_of
from planner.peers.sailor import mixtures_of
from planner.peers.shortlist import Shortlist
from planner.peers.site import Site
from planner.peers.strategy import Clock
from planner.request import Request

LIMITS = Limits(devices=8, blocks=9, global_batch=24, micro_batch=8)
requests = st.integers(0, 10_000).map(lambda seed: random_request(seed, LIMITS))
# one contract, several strategies: hypothesis sees the same method under several classes, which is meant
some = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors])

ONE_PRICE_S = 0.5
"""What a strategy may take beyond its budget: it ends what it has begun."""


def clustered(global_batch: int, a100: int, v100: int) -> Request:
    """OPT-350M on so many nodes of four devices."""
    nodes = (
        NodeEntry(name="a", device="A100-40", gpus=4, count=a100),
        NodeEntry(name="v", device="V100-16", gpus=4, count=v100),
    )
    return Request(
        cluster=Cluster(node=nodes, network=Network(inter_GBps=12.5)),
        model=catalog.model("opt-350m"),
        profile=catalog.profile("opt-350m"),
        global_batch=global_batch,
    )


class StrategyContract:
    """Subclass it, supply the strategy, pass all."""

    strategy: ClassVar[Strategy]

    @some
    @given(requests)
    def test_the_plan_obeys_the_rules(self, request_: Request):
        plan = self.strategy.propose(request_)
        if plan is not None:
            assert check_plan(plan, cluster=request_.cluster, model=request_.model) == ()
            assert plan.schedule in request_.schedules

    @some
    @given(requests)
    def test_the_batch_is_kept(self, request_: Request):
        plan = self.strategy.propose(request_)
        if plan is not None:
            assert plan.global_batch == request_.global_batch
            assert sum(p.micro_batches * p.micro_batch for p in plan.pipelines) == request_.global_batch
            assert all(p.micro_batch <= request_.max_micro_batch for p in plan.pipelines)

    @some
    @given(requests)
    def test_the_plan_fits(self, request_: Request):
        plan = self.strategy.propose(request_)
        if plan is not None:
            assert isinstance(price(plan, request_), Estimate)

    @some
    @given(st.integers(0, 10_000))
    def test_the_same_request_gives_the_same_plan(self, seed: int):
        first, second = (self.strategy.propose(random_request(seed, LIMITS)) for _ in range(2))
        assert first == second

    def test_it_stops_within_its_budget(self):
        request = clustered(1024, 8, 8)
        start = time.thread_time()
        with suppress(NotMeasuredError):
            self.strategy.propose(request, budget_s=0.2)
        assert time.thread_time() - start <= 0.2 + ONE_PRICE_S

    def test_it_finds_plans_and_has_a_name(self):
        proposed = [self.strategy.propose(random_request(seed, LIMITS)) for seed in range(24)]
        assert sum(plan is not None for plan in proposed) >= 2
        assert self.strategy.name in {peer.name for peer in PEERS}


class TestEven(StrategyContract):
    strategy = Even()

    @some
    @given(requests)
    def test_every_device_holds_the_model_and_takes_the_same_to_one_sample(self, request_: Request):
        plan = Even().propose(request_)
        if plan is not None:
            (pipeline,) = plan.pipelines
            (stage,) = pipeline.stages
            assert stage.devices == request_.cluster.devices
            assert max(stage.shares) - min(stage.shares) <= 1


class TestUniform(StrategyContract):
    strategy = Uniform()

    @some
    @given(requests)
    def test_all_devices_stand_in_equal_stages_of_even_layers(self, request_: Request):
        plan = Uniform().propose(request_)
        if plan is None:
            return
        assert len({tuple(s.layers for s in p.stages) for p in plan.pipelines}) == 1
        assert len({(p.micro_batch, p.micro_batches) for p in plan.pipelines}) == 1
        kinds = [block.kind for block in request_.model.blocks]
        common = max(kinds, key=kinds.count)
        layers = [sum(kinds[b] == common for b in s.blocks) for s in plan.pipelines[0].stages]
        assert max(layers) - min(layers) <= 1

    def test_layers_count_and_the_rest_goes_to_the_ends(self):
        kinds = ["embedding", "layer", "layer", "layer", "layer", "layer", "norm", "head"]
        assert even_layers(kinds, 2) == (range(4), range(4, 8))
        assert even_layers(kinds, 5) == (range(2), range(2, 3), range(3, 4), range(4, 5), range(5, 8))
        assert even_layers(kinds, 6) is None


def test_gpipe_alone_is_kept_to():
    seed = next(s for s in range(99) if random_request(s, LIMITS).schedules == (ScheduleKind.GPIPE,))
    proposed = [peer.propose(random_request(seed, LIMITS)) for peer in PEERS]
    assert all(plan.schedule is ScheduleKind.GPIPE for plan in proposed if plan)


class TestAmp(StrategyContract):
    strategy = Amp()

    def test_types_are_averaged_so_a_cut_by_speed_is_not_found(self):
        plan = Amp().propose(clustered(1024, 2, 4))
        assert plan is not None
        assert len({tuple(s.layers for s in p.stages) for p in plan.pipelines}) == 1
        layers = [stop - start for start, stop in (s.layers for s in plan.pipelines[0].stages)]
        assert max(layers) - min(layers) <= 1  # embedding and head cost little here


class TestEspresso(StrategyContract):
    strategy = Espresso()

    def test_faster_devices_get_more_blocks(self):
        plan = Espresso().propose(clustered(1024, 2, 4))
        assert plan is not None
        by_type: dict[str, list[int]] = {}
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                by_type.setdefault(stage.devices[0][0], []).append(len(stage.blocks))
        assert min(by_type["a"]) > max(by_type["v"])


class TestHexiScale(StrategyContract):
    strategy = HexiScale()

    def test_unlike_pipelines_take_micro_batches_by_their_speed(self):
        plan = HexiScale().propose(clustered(1024, 1, 1))
        assert plan is not None
        assert set(plan.devices) == set(clustered(1024, 1, 1).cluster.devices)

    @pytest.mark.parametrize("division", Division)
    def test_every_division_places_every_group_once(self, division: Division):
        request = clustered(1024, 2, 3)
        site = Site(request)
        scheduler = Scheduler(site, Shortlist(site, Clock(1.0)), ScheduleKind.ONE_F_ONE_B)
        partition = Partition(1.0, 0, (2, 1), 2, 3, division)
        pipelines = scheduler.divide(partition, front=True)
        placed = [d for pipeline in pipelines for _, seat in pipeline for d in seat]
        assert sorted(placed) == sorted(request.cluster.devices)
        assert len(pipelines) == 3
        assert all(pipelines)


class TestMetis(StrategyContract):
    strategy = Metis()

    def test_one_pipeline_of_stages_that_are_powers_of_two(self):
        plan = Metis().propose(clustered(1024, 2, 4))
        assert plan is not None
        (pipeline,) = plan.pipelines
        assert all(len(s.devices) & (len(s.devices) - 1) == 0 for s in pipeline.stages)

    def test_orders_move_alike_sizes_together(self):
        assert list(orders((1, 2))) == [(1, 2), (2, 1)]
        assert len(list(orders((1,) * 8 + (2,)))) == 3  # (1 1 1 1) (1 1 1 1) (2)
        assert all(sum(sizes) == 12 for sizes in sums(3, 12))
        assert list(sums(3, 12)) == [(2, 2, 8), (4, 4, 4)]


class TestSailor(StrategyContract):
    strategy = Sailor()

    def test_even_layers_and_copies_that_differ_by_one_micro_batch(self):
        plan = Sailor().propose(clustered(1024, 2, 4))
        assert plan is not None
        counts = [p.micro_batches for p in plan.pipelines]
        assert max(counts) - min(counts) <= 1
        assert len({tuple(s.layers for s in p.stages) for p in plan.pipelines}) == 1

    def test_mixtures_make_up_the_copies(self):
        assert list(mixtures_of([3, 1], 2)) == [(2, 0), (1, 1)]
        few = list(mixtures_of([100, 100, 10], 64))
        assert (64, 0, 0) in few
        assert (54, 0, 10) in few
        assert all(sum(mixture) == 64 for mixture in few)
        assert list(mixtures_of([1, 1], 3)) == []


def test_a_share_beyond_the_profile_is_none_where_smaller_ones_do_not_fit():
    small = clustered(1024, 1, 1)
    entries = tuple(msgspec.structs.replace(entry, memory_GiB=2.0) for entry in small.cluster.node)
    tight = Request(
        cluster=msgspec.structs.replace(small.cluster, node=entries),
        model=small.model,
        profile=small.profile,
        global_batch=1024,
    )
    assert all(peer.propose(tight) is None for peer in PEERS if peer.name != "even")


def test_shares_below_the_profile_are_told():
    small = clustered(1, 1, 1)
    timings = tuple(t for t in small.profile.timings if t.samples >= 4)
    profile = msgspec.structs.replace(small.profile, timings=timings)
    few = Request(cluster=small.cluster, model=small.model, profile=profile, global_batch=1)
    with pytest.raises(NotMeasuredError, match="was not measured for 1 sample"):
        Uniform().propose(few)


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_least_slowest_cut_is_that_of_all_cuts(seed: int):
    rng = random.Random(seed)
    depth, num_blocks = rng.randint(1, 4), rng.randint(4, 7)
    speeds = [rng.choice([1, 2, 3]) for _ in range(depth)]
    blocks = [rng.randint(1, 9) for _ in range(num_blocks)]
    prefixes = [[float(s * x) for x in accumulate(blocks, initial=0)] for s in speeds]
    reaches = [[min(num_blocks, i + rng.choice([1, 2, 3, 9])) for i in range(num_blocks)] for _ in speeds]
    reaches = [list(accumulate(reach, max)) for reach in reaches]
    expected = inf
    for inner in combinations(range(1, num_blocks), depth - 1):
        runs = list(pairwise((0, *inner, num_blocks)))
        if all(reach[a] >= b for reach, (a, b) in zip(reaches, runs, strict=True)):
            expected = min(expected, max(p[b] - p[a] for p, (a, b) in zip(prefixes, runs, strict=True)))
    found = least_slowest([runs_of(p, reach) for p, reach in zip(prefixes, reaches, strict=True)])
    assert (found is None) == (expected == inf)
    if found is not None:
        runs = list(pairwise(found))
        assert max(p[b] - p[a] for p, (a, b) in zip(prefixes, runs, strict=True)) == pytest.approx(expected)
        assert in_proportion(prefixes[0], [1.0] * depth, reaches) is not None


@some
@given(st.data())
def test_a_cut_in_proportion_is_one_that_memory_admits(data):
    """A late block may fit nowhere in a stage though earlier runs do: reaches need not ascend."""
    num_blocks = data.draw(st.integers(2, 7))
    depth = data.draw(st.integers(1, min(4, num_blocks)))
    costs = data.draw(st.lists(st.sampled_from([1.0, 3.0, 9.0]), min_size=num_blocks, max_size=num_blocks))
    reaches = [[data.draw(st.integers(i, num_blocks)) for i in range(num_blocks)] for _ in range(depth)]
    weights = data.draw(st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=depth, max_size=depth))
    found = in_proportion(list(accumulate(costs, initial=0.0)), weights, reaches)
    cuts = [(0, *inner, num_blocks) for inner in combinations(range(1, num_blocks), depth - 1)]
    possible = [
        cut for cut in cuts if all(r[a] >= b for r, (a, b) in zip(reaches, pairwise(cut), strict=True))
    ]
    assert found in possible if possible else found is None


def test_every_depth_at_once_is_as_good_as_one_by_one():
    blocks = [5.0, 1, 1, 7, 2, 2, 9, 1]
    prefix = list(accumulate(blocks, initial=0.0))
    for depth, bounds in enumerate(least_slowest_of_every_depth(runs_of(prefix), 5), start=1):
        alone = least_slowest([runs_of(prefix)] * depth)
        assert alone is not None
        slowest = [max(prefix[b] - prefix[a] for a, b in pairwise(cut)) for cut in (bounds, alone)]
        assert slowest[0] == pytest.approx(slowest[1])
        assert len(bounds) == depth + 1


def test_proportions_follow_speeds_and_memory():
    prefix = list(accumulate([1.0] * 12, initial=0.0))
    free = [[12] * 12] * 2
    assert in_proportion(prefix, [3.0, 1.0], free) == (0, 9, 12)
    tight = [[min(12, i + 6) for i in range(12)], [12] * 12]
    assert in_proportion(prefix, [3.0, 1.0], tight) == (0, 6, 12)
    last = [[12] * 12, [min(12, i + 2) for i in range(12)]]
    assert in_proportion(prefix, [3.0, 1.0], last) == (0, 10, 12)
    assert in_proportion(prefix, [3.0, 1.0], [tight[0], last[1]]) is None
