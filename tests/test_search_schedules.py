"""The search over schedules: interleaved and zero-bubble plans where they win, and never a loss by asking."""

from dataclasses import replace
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.rules import check_plan
from arachne_runtime.plan.schedule import num_rows
from bench.grid import Cell, Nodes
from planner.cost import Estimate, Infeasible, price
from planner.exhaustive import Limits, random_request
from planner.search import Enumeration, find_plan
from planner.search.assemble import alike, plan_of
from planner.search.columns import Completion
from planner.search.complete import Completer
from planner.search.interleave import interleaved
from planner.search.judge import Judge
from planner.search.refine import Refiner
from planner.search.supply import Supply
from planner.search.tidy import tidy
from tests.test_search_templates import request_of

PLAIN, IN_TURNS, SPLIT = (
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.INTERLEAVED,
    ScheduleKind.ZERO_BUBBLE,
)
SMALL = Limits(devices=5, blocks=8, global_batch=12, micro_batch=4)
FEW_BATCHES = {"model": "llama-3-8b", "global_batch": 16, "inter": 25.0}
"""Sixteen samples through eight devices that cannot hold more than a part of the model."""


def found_by(request, *kinds, evaluations=40):
    """From one source, as the plans of so few evaluations depend on what is proposed."""
    only = (Enumeration(),)
    return find_plan(replace(request, schedules=kinds), evaluations=evaluations, peers=(), sources=only)


@pytest.mark.parametrize(
    ("nodes", "gain"),
    [((("h", "H100", 1, 8),), 1.03), ((("a", "A100-80", 4, 2), ("h", "H100", 4, 2)), 1.05)],
)
def test_interleaving_wins_where_micro_batches_are_few(nodes, gain):
    """Alike stages, and unlike ones."""
    request = request_of(*nodes, **FEW_BATCHES)
    plain, found = found_by(request, PLAIN), found_by(request, PLAIN, IN_TURNS)
    assert plain.estimate.iteration_s > gain * found.estimate.iteration_s
    assert found.plan.schedule is IN_TURNS
    assert check_plan(found.plan, cluster=request.cluster, model=request.model) == ()
    pipeline = found.plan.pipelines[0]
    assert len(pipeline.stages) >= 2 * num_rows(IN_TURNS, pipeline)


def test_zero_bubble_wins_where_micro_batches_are_few():
    request = request_of(("h", "H100", 1, 8), **FEW_BATCHES)
    plain, found = found_by(request, PLAIN), found_by(request, PLAIN, IN_TURNS, SPLIT)
    assert found.plan.schedule is SPLIT
    assert plain.estimate.iteration_s > 1.1 * found.estimate.iteration_s


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from(list(ScheduleKind)), min_size=1, max_size=4, unique=True),
    st.data(),
)
def test_more_schedules_never_give_a_slower_plan(seed, kinds, data):
    fewer = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=len(kinds), unique=True))
    request = random_request(seed, SMALL)

    def seconds(chosen):
        try:
            found = found_by(request, *chosen, evaluations=10)
        except NoFeasiblePlanError:
            return inf
        assert found.plan.schedule in chosen
        assert check_plan(found.plan, cluster=request.cluster, model=request.model) == ()
        return found.estimate.iteration_s

    assert seconds(kinds) <= seconds(fewer)


def test_the_answer_does_not_depend_on_the_order_of_the_schedules():
    request = random_request(7, SMALL)
    kinds = list(ScheduleKind)
    assert found_by(request, *kinds).plan == found_by(request, *reversed(kinds)).plan


@pytest.mark.parametrize("runs", [2, 3, 4])
def test_sets_of_devices_keep_what_they_had(runs):
    request = request_of(("a", "A100-80", 4, 1), ("h", "H100", 4, 1), **FEW_BATCHES)
    plan = found_by(request, PLAIN).plan
    found = interleaved(plan, runs, request)
    assert found is not None
    assert check_plan(found, cluster=request.cluster, model=request.model) == ()
    assert isinstance(price(found, request), Estimate)
    for before, after in zip(plan.pipelines, found.pipelines, strict=True):
        rows = len(before.stages)
        assert len(after.stages) == runs * rows
        for row, stage in enumerate(before.stages):
            assert all(s.replicas == stage.replicas for s in after.stages[row::rows])


def test_a_set_that_lacks_memory_recomputes():
    """Interleaved, devices hold more micro-batches than they did: as they were, the same runs do not fit."""
    request = request_of(("a", "A100-40", 1, 8), **(FEW_BATCHES | {"global_batch": 64}))
    columns, completion = columns_of(request, PLAIN)
    part = alike(columns, int(np.argmin(columns.seconds)), request.global_batch)
    plan = plan_of(completion, [part], by_stage=False)
    found = interleaved(plan, 3, request)
    assert isinstance(price(found, request), Estimate)
    assert sum(s.recompute for s in found.pipelines[0].stages) > 3 * sum(
        s.recompute for s in plan.pipelines[0].stages
    )
    plain = [msgspec.structs.replace(s, recompute=False) for s in found.pipelines[0].stages]
    pipeline = msgspec.structs.replace(found.pipelines[0], stages=tuple(plain))
    outcome = price(msgspec.structs.replace(found, pipelines=(pipeline,)), request)
    assert isinstance(outcome, Infeasible)


def test_more_runs_than_blocks_are_no_plan():
    request = request_of(("h", "H100", 1, 8), **FEW_BATCHES)
    assert interleaved(found_by(request, PLAIN).plan, 5, request) is None


def test_moves_keep_devices_in_turns():
    """Shares of one run alone, or replicas in another order, would break the rules."""
    request = request_of(("a", "A100-80", 4, 1), ("h", "H100", 4, 1), **FEW_BATCHES, max_zero=1)
    wide = next(
        plan
        for columns, completion in [columns_of(request, PLAIN)]
        for k in range(len(columns))
        if 1 < columns.templates.width[k].max() < columns.templates.micro_batch[k]
        if (part := alike(columns, k, request.global_batch))
        if (plan := plan_of(completion, [part], by_stage=True))
    )
    found = interleaved(wide, 2, request)
    judge = Judge(request, None, 10)
    moved = list(Refiner(judge, Completer(request, IN_TURNS), 0).neighbours(found))
    assert moved
    assert all(check_plan(plan, cluster=request.cluster, model=request.model) == () for plan in moved)


def columns_of(request, kind, runs=1):
    completion = Completion(request, Supply.of(request), kind, runs)
    columns = completion.columns(Enumeration().templates(completion, 400))
    assert columns is not None
    return columns.take(columns.templates.depth > 1), completion


@pytest.mark.parametrize(
    ("kind", "runs", "error"), [(SPLIT, 1, 0.03), (IN_TURNS, 2, 0.06), (IN_TURNS, 3, 0.1)]
)
def test_closed_forms_are_near_the_price(kind, runs, error):
    request = request_of(("a", "A100-80", 4, 2), ("h", "H100", 4, 2), **(FEW_BATCHES | {"global_batch": 64}))
    columns, completion = columns_of(request, kind, runs)
    columns = columns.take(columns.templates.depth * runs <= len(request.model.blocks))
    errors = []
    for k in np.argsort(columns.seconds, kind="stable")[:60]:
        part = alike(columns, int(k), request.global_batch)
        plan = plan_of(completion, [part], by_stage=bool(columns.by_stage[k])) if part else None
        if plan and runs > 1:
            plan = interleaved(plan, runs, request)
        outcome = price(plan, request) if plan else None
        if isinstance(outcome, Estimate):
            errors.append(abs(columns.seconds[k] / outcome.iteration_s - 1))
    assert len(errors) >= 20
    assert np.median(errors) < error


def test_stages_without_experts_have_no_tiling():
    """Half-layer blocks: a stage may hold attention alone, and a run of an interleaved plan more often."""
    nodes = (Nodes(device="A100-80", gpus=4, count=2), Nodes(device="H100", gpus=4, count=4))
    request = Cell(group="half", model="qwen3-30b-a3b", nodes=nodes).larger()
    plan = found_by(request, PLAIN, evaluations=6).plan
    pipeline = plan.pipelines[0]
    embedding = msgspec.structs.replace(
        pipeline.stages[0], layers=(0, 1), expert_parallel=len(pipeline.stages[0].devices)
    )
    rest = msgspec.structs.replace(pipeline.stages[1], layers=(1, pipeline.stages[1].layers[1]))
    odd = msgspec.structs.replace(pipeline, stages=(embedding, rest, *pipeline.stages[2:]))
    odd = msgspec.structs.replace(plan, pipelines=(odd, *plan.pipelines[1:]))
    judge = Judge(request, None, 10)
    judge.price(odd)
    assert embedding.expert_parallel > 1
    for kept in judge.kept:
        assert check_plan(kept.plan, cluster=request.cluster, model=request.model) == ()
    assert tidy(odd, request).pipelines[0].stages[0].expert_parallel == 1
    assert tidy(plan, request) is plan
