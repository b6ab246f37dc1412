"""Half-layer blocks: a larger space with the same prices."""

import pytest
from msgspec.structs import replace

from bench.grid import Cell, Nodes
from bench.planners import in_halves
from planner.cost import Estimate, price
from planner.search import find_plan

PAIRS = (Nodes(device="A100-80", gpus=4, count=2), Nodes(device="H100", gpus=4, count=4))


def seconds_of(plan, request):
    outcome = price(plan, request)
    assert isinstance(outcome, Estimate)
    return outcome.iteration_s


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-32b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_one_and_the_same_plan_has_one_price(model):
    """Plain and recomputed, dense and with experts, whatever TP the search chooses."""
    cell = Cell(group="half", model=model, nodes=PAIRS)
    request, larger = cell.request(), cell.larger()
    found = find_plan(request, evaluations=4, peers=())
    plans = [found.plan, *(runner.plan for runner in found.runners_up)]
    for plan in plans:
        again = replace(
            plan,
            pipelines=tuple(
                replace(p, stages=tuple(replace(s, recompute=True) for s in p.stages)) for p in plan.pipelines
            ),
        )
        for each in (plan, again):
            assert seconds_of(in_halves(each, request), larger) == pytest.approx(
                seconds_of(each, request), rel=1e-3
            )


@pytest.mark.parametrize("device", ["V100-16", "A100-40", "H100", "B200"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3-like"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_two_halves_cost_a_layer(device, tp, model):
    cell = Cell(group="half", model=model, nodes=(Nodes(device=device, gpus=4, count=1),))
    whole, halves = (r.profile for r in (cell.request(), cell.larger()))
    for samples in (1, 4):
        layer = whole.block("moe-layer", device, tp, samples)
        parts = [halves.block(kind, device, tp, samples) for kind in ("attention", "moe")]
        assert sum(p.forward_s for p in parts) == pytest.approx(layer.forward_s, rel=1e-9)
        assert sum(p.backward_s for p in parts) == pytest.approx(layer.backward_s, rel=1e-9)
