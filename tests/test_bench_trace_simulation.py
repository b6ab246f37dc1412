"""The benchmark of simulated traces: its cases can be planned for, and a result that falls short says so."""

from dataclasses import replace

import pytest

from bench.trace_cases import CASES, SPOT_NOTICE_S
from bench.trace_simulation import _results
from launch.simulation.replay import replay

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_trace_is_of_nodes_that_its_cluster_has(case):
    request = case.request()
    trace = case.trace(request.cluster)
    names = {node.name for node in request.cluster.nodes}
    assert trace.here
    assert all(names.issuperset((*event.goes, *event.comes)) for event in trace.events)
    assert len(request.cluster.devices) <= 1024


def test_the_published_trace_with_the_cloud_s_notice_is_the_same_trace():
    told, untold = (BY_NAME[f"parcae-gpt-neo-2.7b{end}"] for end in ("-notice", ""))
    cluster = told.request().cluster
    first, second = told.trace(cluster), untold.trace(cluster)
    assert [replace(event, notice_s=0.0) for event in first.events] == list(second.events)
    assert {event.notice_s for event in first.events if event.goes} == {SPOT_NOTICE_S}


def test_results_hold_and_can_fail():
    case = BY_NAME["sailor-opt-350m"]
    request = case.request()
    replayed = replay(case.trace(request.cluster), request, case.costs)
    assert all(result.holds for result in _results(case, replayed))
    of_oracle, of_best = _results(replace(case, bound=0.999), replayed)
    assert not of_oracle.holds
    assert of_best.holds
