"""Every rival strategy passes one contract; each then has its own rules."""

import time
from contextlib import suppress
from typing import ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.rules import check_plan
from planner import catalog
from planner.cost import Estimate, price
from planner.exhaustive import Limits, random_request
from planner.peers import PEERS, Even, Strategy, Uniform
from planner.peers import even as even_module
from planner.peers import uniform as uniform_module
from planner.peers.uniform import even_layers
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
        proposed = [self.strategy.propose(random_request(seed, LIMITS)) for seed in range(12)]
        assert sum(plan is not None for plan in proposed) >= 2
        assert self.strategy.name in {peer.name for peer in PEERS}


class TestEven(StrategyContract):
    strategy = Even()

    @some
    @given(requests)
    def test_every_device_holds_the_model_and_takes_the_same_to_one_sample(self, request_: Request):
        plan = even_module.propose(request_)
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
        plan = uniform_module.propose(request_)
        if plan is None:
            return
        assert set(plan.devices) == set(request_.cluster.devices)
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
