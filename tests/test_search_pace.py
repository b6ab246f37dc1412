"""A search ends with its budget, whatever its work takes: rounds get smaller as time runs out."""

from dataclasses import dataclass

import numpy as np
import pytest

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import ScheduleKind
from planner import catalog, find_plan, policy
from planner.policy.sources import MOST_AT_ONCE
from planner.request import Request
from planner.search import judge
from planner.search.batch import firsts
from planner.search.broad import Broad
from planner.search.columns import Completion
from planner.search.judge import Judge
from planner.search.pace import FIXED_S, Pace
from planner.search.running import Running
from planner.search.supply import Supply

BUDGET_S = 0.8
STAGE_S, SHAPE_S, PRICE_S = 5e-4, 5e-4, 5e-3
"""Of the work that the clock below counts: completing is much slower than on any machine."""


@dataclass
class WorkClock:
    """Goes on by work alone."""

    now: float = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = WorkClock()

    def slow(holder, name, seconds):
        plain = getattr(holder, name)

        def slowed(*args):
            clock.now += seconds(*args)
            return plain(*args)

        monkeypatch.setattr(holder, name, slowed)

    slow(Completion, "columns", lambda _, templates: FIXED_S + STAGE_S * int(templates.depth.sum()))
    slow(judge, "price", lambda *_: PRICE_S)
    slow(policy.sources, "expanded", lambda _, shapes: SHAPE_S * len(shapes))
    return clock


def request_of_two_types():
    entries = (
        NodeEntry(name="a", device="A100-40", gpus=4, count=4),
        NodeEntry(name="v", device="V100-16", gpus=4, count=4),
    )
    spec = catalog.model("opt-350m")
    return Request(
        cluster=Cluster(node=entries, network=Network(inter_GBps=12.5)),
        model=spec,
        profile=catalog.profile_for(spec, ["A100-40", "V100-16"]),
        global_batch=256,
    )


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("budget_s", [BUDGET_S, 1.5 * BUDGET_S, 2 * BUDGET_S])
def test_no_work_is_begun_that_does_not_end_in_time(clock, learned, budget_s):
    found = find_plan(request_of_two_types(), time_budget_s=budget_s, peers=(), learned=learned, clock=clock)
    assert found.evaluations > 3
    assert budget_s / 2 < found.seconds <= budget_s + PRICE_S


def test_a_first_plan_is_waited_for(clock):
    """Before there is a plan nothing is cut short."""
    found = find_plan(request_of_two_types(), time_budget_s=0.01, peers=(), clock=clock)
    assert found.seconds > 0.01


def test_where_nothing_near_the_running_plan_fits_others_are_asked_before_moves(monkeypatch):
    done = []

    class Near(Running):
        def batches(self, completion, seed):
            done.append("near")
            return iter(())

    class Other:
        name = "other"

        def batches(self, completion, seed):
            done.append("other")
            return iter(())

    monkeypatch.setattr(Broad, "climb", lambda *_, **__: done.append("moves"))
    request = request_of_two_types()
    broad = Broad(
        Judge(request, BUDGET_S, None), Supply.of(request), ScheduleKind.ONE_F_ONE_B, (Near(), Other())
    )
    broad.start()
    assert done == ["near", "other"]


def test_a_pace_is_that_of_the_round_before():
    clock = WorkClock()
    pace = Pace(clock)
    assert pace.most(1.0) == float("inf")
    with pace.timing(100):
        clock.now += FIXED_S + 0.1
    assert pace.most(2 * (FIXED_S + 0.05)) == pytest.approx(50)
    assert pace.most(FIXED_S) == 0


def test_the_policy_proposes_in_small_batches(monkeypatch):
    sizes = []
    plain = policy.sources.expanded

    def watched(completion, shapes):
        sizes.append(len(shapes))
        return plain(completion, shapes)

    monkeypatch.setattr(policy.sources, "expanded", watched)
    find_plan(request_of_two_types(), evaluations=3, peers=(), learned=True)
    assert sum(sizes) > 2 * MOST_AT_ONCE
    assert max(sizes) <= MOST_AT_ONCE


def test_first_rows_are_those_that_sorting_finds():
    rows = np.random.default_rng(0).integers(0, 3, (200, 4))
    _, wanted = np.unique(rows, axis=0, return_index=True)
    assert firsts(rows).tolist() == sorted(wanted.tolist())
    assert firsts(np.empty((0, 3), np.int64)).tolist() == []
    assert firsts(np.empty((3, 0), np.int64)).tolist() == [0]
