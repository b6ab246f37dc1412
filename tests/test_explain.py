"""What binds a plan, where its figures come from, what is idle, and what one more device would give."""

import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.plan.profile import Source
from arachne_runtime.units import GIB
from planner.cost import Estimate, price
from planner.explain import (
    BindingKind,
    change_of,
    figures_of,
    idle_devices,
    losses_of,
    one_more,
    what_binds,
)
from planner.request import Objective, Request
from planner.search import enlarged, find_plan
from tests.strategies import clusters
from tests.test_losses import plan_of, problem, stage
from tests.test_search_objectives import request_of


def priced(plan, request: Request) -> Estimate:
    found = price(plan, request)
    assert isinstance(found, Estimate)
    return found


def slowed(estimate: Estimate, iteration_s: float) -> Estimate:
    return replace(estimate, iteration_s=iteration_s)


def binds(request: Request, plan) -> dict[BindingKind, str]:
    found = price(plan, request)
    assert isinstance(found, Estimate)
    return {b.kind: b.text for b in what_binds(plan, found, losses_of(plan, found, request), request)}


def test_a_stage_of_one_block_is_told_as_one():
    request = problem(("f", "fast", 2), batch=4)
    whole = priced(plan_of(request, 1, stage((0, 2), ("f:0", 4))), request).limits
    parts = priced(plan_of(request, 1, stage((0, 1), ("f:0", 4)), stage((1, 2), ("f:1", 4))), request).limits
    assert "(blocks 0 to 1 on fast)" in whole
    assert re.search(r"\(block [01] on fast\)", parts)


def test_the_slowest_hop_binds():
    request = problem(("f", "fast", 2), ("g", "slow", 1), batch=4, blocks=3, output_bytes=10**9)
    plan = plan_of(
        request, 4, stage((0, 1), ("f:0", 1)), stage((1, 2), ("f:1", 1)), stage((2, 3), ("g:0", 1))
    )
    found = binds(request, plan)
    assert set(found) == {BindingKind.HOP}
    assert found[BindingKind.HOP] == "hop 1→2 of pipeline 0 (fast to slow): 1 s a micro-batch each way"


def test_a_full_memory_binds():
    roomy = problem(("f", "fast", 1), batch=1, output_bytes=10**9)
    plan = plan_of(roomy, 1, stage((0, 2), ("f:0", 1)))
    assert binds(roomy, plan) == {}
    peak_bytes = price(plan, roomy).peak_bytes["f:0"]
    tight = problem(("f", "fast", 1), batch=1, output_bytes=10**9, memory_GiB=peak_bytes / GIB / 0.95)
    found = binds(tight, plan)
    assert found[BindingKind.MEMORY].startswith("memory of stage 0 of pipeline 0 (fast): 95 % of ")


def test_a_long_reduction_binds():
    request = problem(("f", "fast", 1), ("g", "fast", 1), batch=2, parameters=10**9)
    found = binds(request, plan_of(request, 1, stage((0, 2), ("f:0", 1), ("g:0", 1))))
    assert found[BindingKind.SYNC].startswith("the sum of gradients 0:2 takes 8")


def test_figures_say_the_least_certain_source():
    request = problem(("f", "fast", 1), ("s", "slow", 1), batch=4)
    plan = plan_of(request, 1, stage((0, 2), ("f:0", 3), ("s:0", 1)))
    assert [(f.device, f.source) for f in figures_of(plan, request)] == [
        ("fast", Source.INTERPOLATED),
        ("slow", Source.MEASURED),
    ]


def test_idle_devices_and_the_best_plan_with_them():
    request = problem(("f", "fast", 2), ("s", "slow", 2), batch=4)
    best = plan_of(request, 1, stage((0, 2), ("f:0", 2), ("f:1", 2)))
    wide = plan_of(request, 1, stage((0, 2), ("f:0", 1), ("f:1", 2), ("s:0", 1)))
    quick, slow = priced(best, request), priced(wide, request)
    (told,) = idle_devices(best, quick, [(wide, slow), (best, quick)], request)
    ratio = slow.iteration_s / quick.iteration_s
    assert str(told) == f"2 slow: they do not pay: the best plan with more of them takes {ratio:.3f}x as long"
    (told,) = idle_devices(best, quick, [], request)
    assert told.reason == "no plan among the best uses more of them"
    assert idle_devices(wide, slow, [], request)[0].count == 1


def test_idle_devices_of_a_cheap_plan_cost_too_much():
    nodes = (("a", "A100-40", 1, 10.0, None), ("v", "A100-80", 1, 1.0, None))
    request = request_of(*nodes, objective=Objective.COST, global_batch=8)
    cheap, dear = (plan_of(request, 8, stage((0, 26), (device, 1))) for device in ("v:0", "a:0"))
    found, other = priced(cheap, request), priced(dear, request)
    ratio = 10 * other.iteration_s / found.iteration_s
    (told,) = idle_devices(cheap, found, [(dear, other)], request)
    assert (
        told.reason == f"they do not pay: the best plan with more of them costs {ratio:.3f}x as much a sample"
    )


def test_idle_devices_that_a_limit_forbids():
    nodes = (("a", "A100-40", 1, 10.0, None), ("v", "A100-80", 1, 1.0, None))
    request = request_of(*nodes, max_price_per_hour=4.0, global_batch=8)
    cheap, dear = (plan_of(request, 8, stage((0, 26), (device, 1))) for device in ("v:0", "a:0"))
    (told,) = idle_devices(cheap, priced(cheap, request), [(dear, priced(dear, request))], request)
    assert told.reason == "the nearest plan with more of them is 150 % above the price limit"
    late = request_of(*nodes, objective=Objective.COST, deadline_s=60.0, deadline_samples=8, global_batch=8)
    (told,) = idle_devices(dear, priced(dear, late), [(cheap, slowed(priced(cheap, late), 66.0))], late)
    assert told.reason == "the nearest plan with more of them is 10 % above the deadline"


def test_one_more_device_of_each_type():
    request = problem(("f", "fast", 1), ("s", "slow", 1), batch=12)
    found = find_plan(request, evaluations=200)
    gains = one_more(request, found.estimate.samples_per_s, evaluations=200)
    assert [(g.device, g.added) for g in gains] == [("fast", 1), ("slow", 1)]
    fast, slow = (g.gain for g in gains)
    assert fast == pytest.approx(2 / 3, rel=0.15)  # speeds 2 + 1 become 4 + 1
    assert slow == pytest.approx(1 / 3, rel=0.15)
    assert [g.at_same_share for g in gains] == pytest.approx([2 / 3, 1 / 3])
    assert re.fullmatch(
        r"one more fast device: \+[\d.]+ % \(\+66.7 % at the same share of the ideal\)", str(gains[0])
    )


def test_a_gain_is_never_below_zero():
    request = problem(("f", "fast", 1), batch=1)
    assert [g.gain for g in one_more(request, 1e9, evaluations=20)] == [0.0]


@settings(deadline=None)
@given(cluster=clusters(), data=st.data())
def test_the_enlarged_cluster_is_the_old_one_and_a_node_beside_its_like(cluster, data):
    device = data.draw(st.sampled_from([entry.device for entry in cluster.node]))
    larger, added = enlarged(cluster, device)
    assert larger.devices[: len(cluster.devices)] == cluster.devices
    assert [larger.device_type(d) for d in larger.devices[len(cluster.devices) :]] == [device] * added
    old, new = set(cluster.nodes_by_name), larger.nodes[-1]
    like = next(n.name for n in cluster.nodes if new.name.startswith(f"{n.entry.name}-more"))
    for other in old - {
        n.name for n in cluster.nodes if n.entry.name == new.entry.name.removesuffix("-more")
    }:
        assert larger.link(new.name, other).inter_GBps == cluster.link(like, other).inter_GBps


def test_a_large_cluster_grows_by_a_node_with_the_links_of_its_like():
    pair = NetworkPair(between=("a", "a"), inter_GBps=3.0)
    cluster = Cluster(
        node=(NodeEntry(name="a", device="A100-40", gpus=4, count=3),),
        network=Network(inter_GBps=1.0, pair=(pair,)),
    )
    larger, added = enlarged(cluster, "A100-40")
    assert (added, larger.nodes[-1].name) == (4, "a-more")
    assert larger.link("a-more", "a-1").inter_GBps == 3.0


def test_when_a_change_has_paid():
    request = request_of(("a", "A100-40", 2, None, None), ("b", "A100-40", 2, None, None))
    small = find_plan(request_of(("a", "A100-40", 2, None, None)), evaluations=30, peers=())
    asked = replace(request, running=small.plan)
    found = find_plan(asked, evaluations=30, peers=())
    change = change_of(found, asked)
    assert change.running_s == small.estimate.iteration_s
    steps = change.pays_after_s / change.running_s  # as many as the new plan does in what is left of the time
    assert steps == pytest.approx(
        (change.pays_after_s - change.standstill_s) / found.estimate.iteration_s, rel=1e-9
    )
    assert str(change).startswith("change of the running plan: training stands still for 20")
    soon = replace(asked, change_every_s=21.0)
    kept = change_of(find_plan(soon, evaluations=30, peers=()), soon)
    assert str(kept) == "the running plan is kept: no change pays within 21 s"
    assert change_of(found, request) is None


def test_a_running_plan_that_cannot_go_on_says_why():
    nodes = ("a", "A100-40", 2, None, None), ("b", "A100-40", 2, None, None)
    running = find_plan(request_of(*nodes), evaluations=30, peers=()).plan
    asked = replace(request_of(nodes[0]), running=running)
    change = change_of(find_plan(asked, evaluations=30, peers=()), asked)
    assert str(change).endswith("; the running plan cannot go on: b:0 and 1 more are not in the cluster")
    entry = NodeEntry(name="b", device="A100-40", gpus=2, memory_GiB=6.0)
    roomless = msgspec.structs.replace(asked.cluster, node=(*asked.cluster.node, entry))
    asked = replace(asked, cluster=roomless)
    change = change_of(find_plan(asked, evaluations=30, peers=()), asked)
    assert "; the running plan cannot go on: device b:" in str(change)
