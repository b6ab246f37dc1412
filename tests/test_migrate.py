"""Changes of plan: what moves, and new plans on those of alike devices that hold most of it already."""

import time
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry, node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Predicted, Replica, Stage
from arachne_runtime.plan.rules import check_plan
from planner import catalog
from planner.cost import Estimate, price
from planner.request import Request
from planner.search import find_plan
from planner.search.migrate import change_seconds, migration, roles_of
from planner.search.realign import realigned


def request_of(*nodes, pair=(), batch=16, **more) -> Request:
    """``nodes``: (name, device, gpus, count)."""
    entries = tuple(NodeEntry(name=n, device=d, gpus=g, count=c) for n, d, g, c in nodes)
    return Request(
        cluster=Cluster(node=entries, network=Network(inter_GBps=1.0, pair=pair)),
        model=catalog.model("opt-350m"),
        profile=catalog.profile("opt-350m"),
        global_batch=batch,
        **more,
    )


def chain(*stages: tuple[tuple[int, int], tuple[str, ...]], count=16) -> Plan:
    """One pipeline; of each stage its blocks and the devices of its only replica."""
    pipeline = Pipeline(
        micro_batches=count,
        micro_batch=1,
        stages=tuple(Stage(layers=b, replicas=(Replica(devices=d, share=1),)) for b, d in stages),
    )
    return Plan(model="opt-350m", global_batch=count, sequence=2048, pipelines=(pipeline,))


A = request_of(("a", "A100-40", 2, 3))


def gigabytes(old: Plan, new: Plan, request: Request = A) -> float:
    """That the node which waits longest gets, at 1 GB/s."""
    return change_seconds(old, new, request) - request.migration_pause_s


def test_alike_nodes_change_places():
    old = chain(((0, 13), ("a-2:0",)), ((13, 26), ("a-0:0",)))
    new = chain(((0, 12), ("a-0:0",)), ((12, 26), ("a-1:0",)))
    better = realigned(new, old, A)
    assert better == chain(((0, 12), ("a-2:0",)), ((12, 26), ("a-0:0",)))
    layer = gigabytes(old, better)
    assert 0 < layer < gigabytes(old, new) / 5
    assert realigned(better, old, A) is better


def test_devices_of_a_node_change_places():
    old = chain(((0, 13), ("a-0:1",)), ((13, 26), ("a-0:0",)))
    new = chain(((0, 13), ("a-0:0",)), ((13, 26), ("a-0:1",)))
    assert realigned(new, old, A) == old
    shards = chain(((0, 26), ("a-0:1", "a-0:0")))
    assert realigned(chain(((0, 26), ("a-1:0", "a-1:1"))), shards, A) == shards


def test_nodes_that_differ_stay_where_they_are():
    new = chain(((0, 13), ("a:0",)), ((13, 26), ("b:0",)))
    old = chain(((0, 13), ("b:0",)), ((13, 26), ("a:0",)))
    alike = ("a", "A100-40", 1, 1), ("b", "A100-40", 1, 1)
    assert realigned(new, old, request_of(*alike)) == old
    slow = NetworkPair(between=("a", "b"), inter_GBps=0.5)
    for other in (
        request_of(("a", "A100-40", 1, 1), ("b", "V100-16", 1, 1)),
        request_of(("a", "A100-40", 1, 1), ("b", "A100-40", 2, 1)),
        request_of(*alike, ("c", "A100-40", 1, 1), pair=(replace_between(slow, "c"),)),
    ):
        assert realigned(new, old, other) is new


def replace_between(pair: NetworkPair, other: str) -> NetworkPair:
    return msgspec.structs.replace(pair, between=("a", other))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_realigned_plans_are_the_same_plans_and_move_no_more(rng):
    """Same price, same rules, never more to wait for."""
    request = request_of(("a", "A100-40", 2, 3), ("v", "V100-16", 3, 2))
    old, new = (random_chain(rng, request) for _ in range(2))
    better = realigned(new, old, request)
    assert check_plan(better, cluster=request.cluster, model=request.model) == ()
    assert change_seconds(old, better, request) <= change_seconds(old, new, request)
    before, after = price(new, request), price(better, request)
    if isinstance(before, Estimate):
        assert after.iteration_s == pytest.approx(before.iteration_s, rel=1e-9)
    kinds = [[request.cluster.device_type(d) for d in plan.devices] for plan in (new, better)]
    assert kinds[0] == kinds[1]


def random_chain(rng, request: Request) -> Plan:
    devices = list(request.cluster.devices)
    rng.shuffle(devices)
    used = devices[: rng.randint(2, 6)]
    bounds = [0, *sorted(rng.sample(range(1, 26), len(used) - 1)), 26]
    return chain(*((span, (d,)) for span, d in zip(pairwise(bounds), used, strict=True)))


def test_what_moves_is_what_is_on_no_device_of_the_node():
    """Against counting block by block."""
    old = chain(((0, 13), ("a-2:0", "a-2:1")), ((13, 26), ("a-0:0",)))
    new = chain(((0, 20), ("a-2:0", "a-2:1")), ((20, 26), ("a-1:0",)))
    held = {}
    for device, roles in roles_of(old.pipelines).items():
        parts = {(block, r.shard, r.of) for r in roles for block in range(r.start, r.stop)}
        held.setdefault(node_of(device), set()).update(parts)
    entering = {}
    change = migration(old, A)
    for device, roles in roles_of(new.pipelines).items():
        for role in roles:
            for block in range(role.start, role.stop):
                node = node_of(device)
                if (block, role.shard, role.of) not in held.get(node, ()):
                    entering[node] = entering.get(node, 0.0) + change.state_bytes[block] / role.of
    found = dict(zip(change.node_number, change.entering(roles_of(new.pipelines)).tolist(), strict=True))
    assert {node: round(size) for node, size in found.items() if size} == {
        node: round(size) for node, size in entering.items()
    }
    assert gigabytes(old, new) == pytest.approx(max(found.values()) / 1e9)


def test_the_search_changes_to_devices_that_hold_the_blocks():
    """Plans stood in the order of the cluster file: their changes moved more, and were priced so."""
    request = request_of(("a", "A100-40", 1, 4), batch=64)
    old = chain(((0, 13), ("a-3:0",)), ((13, 26), ("a-0:0",)), count=64)
    again = replace(request, running=old)
    found = find_plan(again, evaluations=40, peers=())
    assert not found.is_running
    scratch = find_plan(request, evaluations=40, peers=())
    assert found.estimate.iteration_s == scratch.estimate.iteration_s
    assert found.change_s <= change_seconds(old, scratch.plan, again)
    ours, theirs = (
        migration(old, again).entering(roles_of(p.pipelines)).sum() for p in (found.plan, scratch.plan)
    )
    assert ours == pytest.approx(theirs / 2, rel=0.1)  # the two new devices' stages alone


def test_a_running_plan_may_come_from_a_file():
    """It says what is predicted of each device: such a plan has no hash, and the search failed."""
    request = request_of(("a", "A100-40", 2, 1), batch=8)
    plan = find_plan(request, evaluations=20, peers=()).plan
    predicted = Predicted(iteration_s=1.0, samples_per_s=1.0, peak_bytes={"a:0": 1.0})
    running = msgspec.structs.replace(plan, predicted=predicted)
    found = find_plan(replace(request, running=running), evaluations=20, peers=())
    assert found.is_running
    assert found.plan == plan


def test_a_large_plan_is_realigned_in_time():
    request = request_of(("a", "A100-40", 4, 128), batch=512)
    devices = request.cluster.devices
    old, new = (
        Plan(
            model="opt-350m",
            global_batch=512,
            sequence=2048,
            pipelines=tuple(chain(*halves(order, p)).pipelines[0] for p in range(256)),
        )
        for order in (devices, devices[::-1])
    )
    change_seconds(old, new, request)
    before = time.thread_time()
    assert gigabytes(old, realigned(new, old, request), request) == 0.0
    assert time.thread_time() - before < 0.5
    before = time.thread_time()
    change_seconds(old, new, request)
    assert time.thread_time() - before < 0.05


def halves(order: tuple[str, ...], p: int):
    return ((0, 13), (order[2 * p],)), ((13, 26), (order[2 * p + 1],))
