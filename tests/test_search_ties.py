"""The closed form of a template counts what its first and its last stage share."""

import pytest

from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import ScheduleKind
from planner import catalog
from planner.cost import Estimate, price
from planner.request import Request
from planner.search.assemble import alike, plan_of
from planner.search.batch import Templates
from planner.search.columns import Completion
from planner.search.supply import Supply


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_tied_embeddings_are_summed(stages: int, tp: int) -> None:
    model = catalog.model("qwen3-0.6b", sequence=512)
    entry = NodeEntry(name="a", device="A100-80", gpus=2, count=4)
    request = Request(
        cluster=Cluster(node=(entry,), network=Network(inter_GBps=1.0)),
        model=model,
        profile=catalog.profile_for(model, ["A100-80"], tp_degrees=(1, 2)),
        global_batch=16,
    )
    completion = Completion(request, Supply.of(request), ScheduleKind.ONE_F_ONE_B)
    copies = 8 // (stages * tp)
    columns = completion.columns(Templates.of([([(0, tp, 1, 1)] * stages, copies, 1)]))
    assert columns is not None
    part = alike(columns, 0, 16)
    assert part is not None
    plan = plan_of(completion, [part], by_stage=bool(columns.by_stage[0]))
    assert plan is not None
    outcome = price(plan, request)
    assert isinstance(outcome, Estimate)
    assert float(columns.seconds[0]) == pytest.approx(outcome.iteration_s, rel=0.1)
