"""Changes with which a plan that does not fit would."""

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import GIB
from planner.cost import Estimate, Infeasible, price
from planner.explain import repairs
from planner.explain.repair import _changes
from planner.request import Request
from tests.test_losses import plan_of, problem, stage


def told(plan: Plan, request: Request) -> dict[str, float]:
    misfit = price(plan, request)
    assert isinstance(misfit, Infeasible)
    found = repairs(plan, misfit, request)
    changed = dict(_changes(plan, misfit))
    for repair in found:
        outcome = price(changed[repair.text], request)
        assert isinstance(outcome, Estimate)
        assert outcome.iteration_s == repair.iteration_s
        assert changed[repair.text].global_batch == plan.global_batch
    assert [r.iteration_s for r in found] == sorted(r.iteration_s for r in found)
    return {repair.text: repair.iteration_s for repair in found}


def test_parameters_are_shared_among_replicas():
    request = problem(("f", "fast", 4), batch=8, parameters=10**9 // 4, memory_GiB=8.0)
    plan = plan_of(request, 1, stage((0, 2), *((f"f:{i}", 2) for i in range(4))))
    found = told(plan, request)
    assert "ZeRO 1 where stages have several replicas" in found
    assert "recomputation everywhere" not in found


def test_activations_are_computed_again_or_halved():
    request = problem(("f", "fast", 2), batch=16, output_bytes=2 * 10**8, activations=10**9, memory_GiB=12.0)
    plan = plan_of(request, 4, stage((0, 1), ("f:0", 4)), stage((1, 2), ("f:1", 4)))
    found = told(plan, request)
    assert "micro-batches of half the samples, twice as many" in found
    assert not any(text.startswith("ZeRO") for text in found)


def test_odd_shares_are_not_halved():
    request = problem(("f", "fast", 1), batch=1, parameters=10**9, memory_GiB=4.0)
    assert told(plan_of(request, 1, stage((0, 2), ("f:0", 1))), request) == {}


def test_recomputation_of_the_stage_that_lacks_memory():
    fields = {"batch": 8, "blocks": 5, "output_bytes": 10**7, "activations": 10**9}
    roomy = problem(("f", "fast", 4), **fields)
    cut = [(0, 2), (2, 3), (3, 4), (4, 5)]
    plan = plan_of(roomy, 8, *(stage(layers, (f"f:{s}", 1)) for s, layers in enumerate(cut)))
    tight = problem(("f", "fast", 4), **fields, memory_GiB=0.95 * price(plan, roomy).peak_bytes["f:0"] / GIB)
    found = told(plan, tight)
    assert set(found) == {"recomputation in stage 0 of pipeline 0", "recomputation everywhere"}
    # micro-batches of one sample cannot be halved, and there is nobody to share with
