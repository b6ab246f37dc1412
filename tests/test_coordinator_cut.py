"""A cluster cut to the devices that are there: the same devices and links under other names."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry, node_of
from arachne_runtime.plan.plan import MadeBy
from arachne_runtime.plan.rules import check_cluster, check_plan
from launch.coordinator.cut import cut
from launch.coordinator.slowed import Slowed

from .strategies import clusters, plans

CLUSTER = Cluster(
    node=(
        NodeEntry(name="a", device="A100-40", gpus=4, count=3),
        NodeEntry(name="b", device="T4-16", gpus=2, zone="far"),
    ),
    network=Network(
        inter_GBps=10.0,
        pair=(
            NetworkPair(between=("a", "far"), inter_GBps=1.0),
            NetworkPair(between=("a", "a"), inter_GBps=5.0),
            NetworkPair(between=("a-1", "a-2"), inter_GBps=2.0),
        ),
    ),
)


def test_what_is_left_of_a_node_gets_a_name_of_its_own():
    here = cut(CLUSTER, [d for d in CLUSTER.devices if d not in ("a-0:1", "a-1:0") and node_of(d) != "b"])
    assert [(e.name, e.gpus, e.count) for e in here.cluster.node] == [
        ("a", 4, 1),
        ("a-0.0", 3, 1),
        ("a-1.0", 3, 1),
    ]
    assert not check_cluster(here.cluster)
    assert here.names["a-0:2"] == "a-0.0:1"
    assert here.names["a-2:3"] == "a:3"
    assert here.cluster.link("a-1.0", "a").inter_GBps == 2.0
    assert here.cluster.link("a-0.0", "a").inter_GBps == 5.0
    assert not [pair for pair in here.cluster.network.pair if "far" in pair.between]


def test_devices_of_a_node_may_count_as_other_types():
    here = cut(CLUSTER, CLUSTER.devices, Slowed(CLUSTER, {"a-1:2": 3.0}))
    assert here.cluster.device_type(here.names["a-1:2"]) == "A100-40*3"
    assert here.cluster.device_type(here.names["a-1:3"]) == "A100-40"
    assert len(here.cluster.devices) == len(CLUSTER.devices)


@settings(max_examples=100, deadline=None)
@given(clusters(), st.data())
def test_devices_and_links_are_the_same_and_plans_come_back(whole, data):
    there = data.draw(st.sets(st.sampled_from(whole.devices), min_size=1))
    here = cut(whole, there)
    assert set(here.names) == there
    assert sorted(here.names.values()) == sorted(here.cluster.devices)
    assert not check_cluster(here.cluster)
    for device, name in here.names.items():
        assert here.cluster.device_type(name) == whole.device_type(device)
        for other, its_name in here.names.items():
            nodes, cut_nodes = (node_of(device), node_of(other)), (node_of(name), node_of(its_name))
            assert (nodes[0] == nodes[1]) is (cut_nodes[0] == cut_nodes[1])
            if nodes[0] != nodes[1]:
                a, b = whole.link(*nodes), here.cluster.link(*cut_nodes)
                assert (a.inter_GBps, a.latency_us) == (b.inter_GBps, b.latency_us)
    plan = data.draw(plans(devices=here.cluster.devices))
    made = MadeBy(solver="x", version="0", cluster="c", model="m", profile="p")
    plan = msgspec.structs.replace(plan, made_by=made)
    real = here.back(plan)
    assert set(real.devices) <= there
    assert not check_plan(real, cluster=whole)
    assert here.there(real).pipelines == plan.pipelines
    fewer = cut(whole, there - {real.devices[0]})
    assert not set(fewer.there(real).devices) <= set(fewer.cluster.devices)
    if "" not in real.made_by.device_types.values():
        assert fewer.there(real).made_by.device_types.keys() >= {
            node_of(n) for n in fewer.there(real).devices
        }
