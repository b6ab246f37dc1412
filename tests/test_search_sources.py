"""Who proposes: the running plan on changed devices, uniform plans, the policy where its weights are."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from arachne_runtime.errors import PolicyMissingError
from arachne_runtime.plan.plan import MadeBy, Pipeline, Plan, Replica, ScheduleKind, Stage
from planner import find_plan, search, sources
from planner.policy import Policy
from planner.search import Enumeration, Running, Uniform, signed
from planner.search.batch import Templates
from planner.search.find import AGAIN_PATIENCE
from planner.search.moves import lines_of
from planner.search.running import lines_on
from planner.search.shapes import Shapes, possible, shapes_of
from planner.search.supply import Supply
from tests.test_search_templates import MIXED, completion_of, request_of


@pytest.fixture
def without_weights(monkeypatch):
    def missing(path=None):
        raise PolicyMissingError("no weights")

    monkeypatch.setattr(Policy, "load", missing)
    sources._learned.cache_clear()
    yield
    sources._learned.cache_clear()


@pytest.fixture
def with_weights(monkeypatch):
    monkeypatch.setattr(Policy, "load", lambda path=None: Policy.new(0))
    sources._learned.cache_clear()
    yield
    sources._learned.cache_clear()


def test_without_weights_it_plans_and_says_so(without_weights):
    request = request_of(*MIXED)
    asked, notes = sources.with_policy(request)
    assert [source.name for source in asked] == ["uniform", "enumeration"]
    found = find_plan(request, evaluations=3, peers=(), learned=True)
    assert found.notes == notes == ("planned without the learned policy: no weights",)


def test_the_policy_is_asked_and_enumeration_beside_it(with_weights):
    request = request_of(*MIXED)
    asked, notes = sources.with_policy(request)
    assert [source.name for source in asked] == ["uniform", "enumeration", "policy"]
    assert notes == ()
    plans = [find_plan(request, seed=3, evaluations=8, peers=(), learned=True).plan for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_short_or_counted_search_does_not_read_the_policy(without_weights):
    request = request_of(*MIXED)
    assert [source.name for source in sources.usual_sources(request)] == ["uniform", "enumeration"]
    assert find_plan(request, evaluations=3, peers=()).notes == ()
    assert find_plan(request, time_budget_s=0.05, peers=()).notes == ()


def test_a_long_search_without_weights_says_so(without_weights):
    notes = find_plan(request_of(*MIXED), time_budget_s=1.0, peers=(), clock=Ticks(0.02)).notes
    assert notes == ("planned without the learned policy: no weights",)


class Ticks:
    """A clock that goes on by a part of a second each time that it is looked at."""

    def __init__(self, tick_s):
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self):
        self.now += self.tick_s
        return self.now


class Recorded:
    """A source that keeps the seeds that it was asked with, and proposes what another does."""

    name = "recorded"

    def __init__(self, source):
        self.source, self.seeds = source, []

    def batches(self, completion, seed):
        self.seeds.append(seed)
        return self.source.batches(completion, seed)


def test_with_time_left_other_sources_are_asked_from_new_seeds():
    """The usual source knows uniform plans alone; what comes later knows better ones."""
    request = request_of(*MIXED)
    first = Recorded(Uniform())
    alone = search_for(request, first)
    later = Recorded(Enumeration())
    found = search_for(request, Recorded(Uniform()), later)
    assert set(first.seeds) == {5}
    assert later.seeds == list(range(6, 6 + len(later.seeds)))
    assert len(later.seeds) >= AGAIN_PATIENCE
    assert found.estimate.iteration_s <= alone.estimate.iteration_s


def test_time_that_is_over_leaves_what_would_come_later_unasked():
    later = Recorded(Enumeration())
    search.find_plan(request_of(*MIXED), time_budget_s=0.2, peers=(), later=(later,), clock=Ticks(0.05))
    assert later.seeds == []


def search_for(request, source, *later):
    return search.find_plan(
        request, seed=5, time_budget_s=1e4, peers=(), sources=(source,), later=later, clock=Ticks(1e-3)
    )


def test_uniform_plans_come_in_one_small_batch():
    completion = completion_of(request_of(*MIXED))
    (batch,) = Uniform().batches(completion, 0)
    assert 0 < len(batch) <= 120
    assert len(possible(completion, batch)) == len(batch)
    for stages, _, _ in lines_of(batch):
        assert len({tp for _, tp, _, _ in stages}) == 1
    pools = {frozenset(pool for pool, _, _, _ in stages) for stages, _, _ in lines_of(batch)}
    assert {frozenset({0}), frozenset({0, 1})} <= pools


def test_a_plan_is_read_back_as_the_template_it_was_made_of():
    request = request_of(*MIXED)
    plan = find_plan(request, evaluations=6, peers=()).plan
    lines = lines_on(plan, Supply.of(request))
    assert sum(copies for _, copies, _ in lines) == len(plan.pipelines)
    stages, _, size = lines[0]
    first = next(p for p in plan.pipelines if len(p.stages) == len(stages) and p.micro_batch == size)
    assert [width for _, _, width, _ in stages] == [len(stage.replicas) for stage in first.stages]
    assert [tp for _, tp, _, _ in stages] == [len(stage.replicas[0].devices) for stage in first.stages]


def test_a_node_that_is_gone_is_like_those_of_its_type():
    old = request_of(*MIXED)
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(device,), share=2),))
        for layers, device in (((0, 20), "a-0:0"), ((20, 26), "v-0:0"))
    )
    plan = Plan(
        model=old.model.name,
        global_batch=64,
        sequence=old.model.sequence,
        pipelines=(Pipeline(micro_batches=32, micro_batch=2, stages=stages),),
    )
    left = Supply.of(request_of(("a", "A100-40", 4, 2), ("v-1", "V100-16", 4, 1)))
    assert lines_on(plan, left) == []
    types = {"a-0": "A100-40", "v-0": "V100-16"}
    made_by = MadeBy(solver="", version="", cluster="", model="", profile="", device_types=types)
    assert lines_on(changed(plan, made_by=made_by), left) == [(((0, 1, 1, 1), (1, 1, 1, 1)), 1, 2)]


def test_a_running_plan_may_be_signed():
    request = request_of(*MIXED)
    running = signed(find_plan(request, evaluations=6, peers=()), request, version="1")
    found = find_plan(replace(request, running=running), evaluations=6, peers=())
    assert found.is_running


def test_the_running_plans_shapes_come_first_then_moves_from_them():
    """After nodes are lost the likely plans are the running one's pipelines, or a move away."""
    old = request_of(("a", "A100-40", 4, 3), ("v", "V100-16", 4, 2))
    running = signed(find_plan(old, evaluations=6, peers=()), old, version="1")
    new = request_of(("a-0", "A100-40", 4, 1), ("v", "V100-16", 4, 1))
    completion = completion_of(replace(new, running=running))
    first, own, moved = Running().batches(completion, 0)
    assert len(first) == 0  # each of its pipelines as it was stands on more devices than there are
    wanted = shapes_of(Templates.of(lines_on(running, completion.supply))).distinct()
    assert len(Shapes.joined([shapes_of(own), wanted]).distinct()) == len(shapes_of(own).distinct())
    assert len(possible(completion, moved)) == len(moved) > 20
    assert len(shapes_of(moved).distinct()) > len(shapes_of(own).distinct())
    assert list(Running().batches(completion_of(old), 0)) == []


def test_a_replan_from_the_running_shapes_alone_finds_a_plan():
    old = request_of(("a", "A100-40", 4, 3), ("v", "V100-16", 4, 2))
    running = signed(find_plan(old, evaluations=6, peers=()), old, version="1")
    new = request_of(("a-0", "A100-40", 4, 1), ("a-1", "A100-40", 4, 1), ("v", "V100-16", 4, 2))
    found = find_plan(replace(new, running=running), evaluations=12, peers=(), sources=(Running(),))
    whole = find_plan(new, evaluations=60, peers=())
    assert found.plan.schedule is ScheduleKind.ONE_F_ONE_B
    assert found.estimate.iteration_s <= 1.05 * whole.estimate.iteration_s
