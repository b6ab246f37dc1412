"""The strategies that other tests lean on give only valid documents, and reach what they promise."""

from collections.abc import Callable

from hypothesis import Phase, find, given, settings
from hypothesis.strategies import SearchStrategy

from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.rules import check_cluster, check_model, check_plan
from tests.strategies import clusters, models, plans, settings_of_a_plan


@given(clusters())
def test_clusters_are_valid(cluster):
    assert check_cluster(cluster) == ()


@given(models(experts=True))
def test_models_are_valid(model):
    assert check_model(model) == ()


@given(settings_of_a_plan())
def test_plans_are_valid(setting):
    cluster, model, plan = setting
    assert check_plan(plan, cluster=cluster, model=model) == ()


@given(plans(tp=1))
def test_plans_without_tensor_parallelism(plan):
    assert check_plan(plan) == ()
    assert all(len(r.devices) == 1 for p in plan.pipelines for s in p.stages for r in s.replicas)
    assert len(plan.devices) <= 6
    assert plan.num_blocks <= 6


def reached(strategy: SearchStrategy[Plan], condition: Callable[[Plan], bool]) -> bool:
    found = find(strategy, condition, settings=settings(phases=[Phase.generate], max_examples=1000))
    return condition(found)


def test_plans_reach_every_shape():
    def widths(plan: Plan) -> set[int]:
        return {len(s.replicas) for p in plan.pipelines for s in p.stages}

    assert reached(plans(), lambda p: len(p.pipelines) == 3)
    assert reached(plans(tp=1), lambda p: len(p.devices) == 6 and len(p.pipelines) == 2)
    assert reached(plans(tp=1), lambda p: any(len(pipe.stages) > 2 for pipe in p.pipelines))
    assert reached(plans(tp=1), lambda p: len(widths(p)) > 1)
    assert reached(
        plans(tp=1), lambda p: any(len(set(s.shares)) > 1 for pipe in p.pipelines for s in pipe.stages)
    )
    assert reached(plans(tp=1), lambda p: len({len(pipe.stages) for pipe in p.pipelines}) > 1)
    assert reached(
        plans(), lambda p: any(len(r.devices) > 1 for q in p.pipelines for s in q.stages for r in s.replicas)
    )
