"""The price is quick: CPU time of large plans, and links of many nodes without looking at every pair."""

import time
from dataclasses import replace
from importlib import import_module

import msgspec
import pytest

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from planner import catalog
from planner.cost import Estimate, price
from planner.cost.fleet import Fleet
from planner.request import Request

TYPES = ("A100-40", "V100-16", "GH200", "RTX-3090")


def large(
    num_devices: int, depth: int, micro_batches: int, schedule: ScheduleKind, zones: int = 1
) -> tuple[Plan, Request]:
    """Alike pipelines whose stages walk through four device types, nodes of four."""
    spec = catalog.model("opt-350m")
    nodes = [
        NodeEntry(
            name=f"n{i}",
            device=TYPES[i * len(TYPES) * 4 // num_devices],
            gpus=4,
            memory_GiB=90,
            zone=f"z{i % zones}",
        )
        for i in range(num_devices // 4)
    ]
    pairs = [NetworkPair(between=(f"z{a}", f"z{b}"), inter_GBps=5.0) for a in range(zones) for b in range(a)]
    cluster = Cluster(node=tuple(nodes), network=Network(inter_GBps=12.5, pair=tuple(pairs)))
    count, last = num_devices // depth, len(spec.blocks)
    cuts = [last * s // depth for s in range(depth + 1)]
    pipelines = []
    for p in range(count):
        devices = [divmod(s * count + p, 4) for s in range(depth)]
        stages = [
            Stage(layers=(cuts[s], cuts[s + 1]), replicas=(Replica(devices=(f"n{n}:{i}",), share=1),))
            for s, (n, i) in enumerate(devices)
        ]
        pipelines.append(Pipeline(micro_batches=micro_batches, micro_batch=1, stages=tuple(stages)))
    total = count * micro_batches
    plan = Plan(
        model=spec.name, global_batch=total, sequence=2048, schedule=schedule, pipelines=tuple(pipelines)
    )
    request = Request(
        cluster=cluster,
        model=spec,
        profile=catalog.profile(spec.name),
        global_batch=total,
        schedules=(schedule,),
    )
    return plan, request


@pytest.mark.parametrize(
    ("num_devices", "schedule", "cold_s", "warm_s"),
    [
        (512, ScheduleKind.ONE_F_ONE_B, 0.15, 0.03),
        (512, ScheduleKind.ZERO_BUBBLE, 0.15, 0.03),
        (4096, ScheduleKind.ONE_F_ONE_B, 1.5, 0.3),
    ],
)
def test_cpu_time_of_a_large_plan(num_devices, schedule, cold_s, warm_s):
    plan, request = large(num_devices, 8, 32, schedule)
    seconds = []
    for _ in range(4):
        start = time.process_time()
        assert isinstance(price(plan, request), Estimate)
        seconds.append(time.process_time() - start)
    assert seconds[0] <= cold_s
    assert min(seconds[1:]) <= warm_s


def test_links_by_kind_of_node_are_those_of_every_pair():
    _, request = large(64, 4, 1, ScheduleKind.ONE_F_ONE_B, zones=3)
    fleet, fresh = request.fleet, Fleet(request.cluster, request.profile)
    names = list(fleet.nodes)
    for some in (names, names[::3], names[:2], names[5:6]):
        among = {
            (k.latency_s, k.seconds_per_byte, k.curves, k.scope)
            for k in fleet.links_among(tuple(some), False)
        }
        pairs = [(a, b) for i, a in enumerate(some) for b in some[i + 1 :]] or [(some[0], some[0])]
        each = [fresh._inter(a, b) if a != b else fresh._intra(a) for a, b in pairs]
        assert among == {(k.latency_s, k.seconds_per_byte, k.curves, k.scope) for k in each}
        for a, b in pairs:
            assert fleet.link(a, b) == fleet.link(b, a) == (fresh._inter(a, b) if a != b else fresh._intra(a))


@pytest.mark.parametrize("zones", [1, 3])
def test_alike_pipelines_are_worked_out_once_and_cost_what_each_does(monkeypatch, zones):
    """Pipelines in nodes of unlike zones, and on unlike links, are not alike."""
    module = import_module("planner.cost.price")

    plan, request = large(64, 8, 8, ScheduleKind.ONE_F_ONE_B, zones)
    nodes = tuple(
        msgspec.structs.replace(n, zone=f"z{i // 3 % zones}") for i, n in enumerate(request.cluster.node)
    )
    request = replace(request, cluster=msgspec.structs.replace(request.cluster, node=nodes))
    asked = []
    actors_of = module.actors_of
    monkeypatch.setattr(module, "actors_of", lambda *args: (asked.append(args), actors_of(*args))[1])
    quick = price(plan, request)
    once = len(asked)
    monkeypatch.setattr(module, "what_actors_depend_on", lambda *args: object())
    each = price(plan, request)
    assert len(asked) - once == len(plan.pipelines) > once
    assert isinstance(quick, Estimate)
    assert quick.iteration_s == each.iteration_s
    assert quick.timeline == each.timeline
