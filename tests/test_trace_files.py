"""Traces in all three forms, and files that are wrong: refused with place and reason."""

import json
from pathlib import Path

import pytest

from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from launch.simulation.availability import Turn, moments
from launch.simulation.places import node_by_node, with_nodes
from launch.simulation.reading import read_trace
from launch.simulation.trace import Event

PARCAE = "0,1\n0,2\n60000,3\n180000,2\n180000,1\n300000,2\n"
SAILOR = [{"Time": t, "GPUs": n} for t, n in ((0, 4), (63, 4), (126, 2), (189, 3), (252, 3))]
OWN = """format = "arachne.trace/1"
duration_s = 1000
here = ["a", "b-0"]
[[event]]
at_s = 10
comes = ["b-1"]
[[event]]
at_s = 500
goes = ["a", "b-1"]
notice_s = 30
[costs]
start_s = 5
"""


def cluster(gpus: int = 1, count: int = 3) -> Cluster:
    entry = NodeEntry(name="b", device="A100-40", gpus=gpus, count=count)
    return Cluster(
        node=(NodeEntry(name="a", device="A100-40", gpus=gpus), entry), network=Network(inter_GBps=1)
    )


def written(folder: Path, text: str, name: str = "trace.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_parcae(tmp_path):
    found, _ = read_trace(written(tmp_path, PARCAE, "spot.csv"), cluster())
    assert (found.name, found.duration_s, found.here) == ("spot.csv", 300.0, ("a", "b-0"))
    first, second, third = found.events
    assert first == Event(at_s=60.0, comes=("b-1",))
    assert (second.at_s, len(second.goes), second.comes) == (180.0, 2, ())
    assert (third.at_s, len(third.comes)) == (300.0, 1)


def test_sailor(tmp_path):
    found, _ = read_trace(written(tmp_path, json.dumps(SAILOR), "a100.json"), cluster())
    assert (found.duration_s, len(found.here)) == (252.0, 4)
    assert [(e.at_s, len(e.goes), len(e.comes)) for e in found.events] == [(126.0, 2, 0), (189.0, 0, 1)]


def test_sailor_counts_devices_of_whole_nodes(tmp_path):
    even = [{"Time": 0, "GPUs": 4}, {"Time": 9, "GPUs": 2}]
    found, _ = read_trace(written(tmp_path, json.dumps(even), "a100.json"), cluster(gpus=2))
    assert (len(found.here), len(found.events[0].goes)) == (2, 1)
    with pytest.raises(InvalidFileError, match=r"\$\[3\]  3 devices are no whole number of nodes of 2"):
        read_trace(written(tmp_path, json.dumps(SAILOR), "a100.json"), cluster(gpus=2))


def test_our_own(tmp_path):
    found, costs = read_trace(written(tmp_path, OWN), cluster())
    assert found.here == ("a", "b-0")
    assert found.events == (
        Event(at_s=10, comes=("b-1",)),
        Event(at_s=500, goes=("a", "b-1"), notice_s=30),
    )
    assert (costs.start_s, costs.recover_s) == (5, 0.35)


def test_our_own_around_a_published_one(tmp_path):
    written(tmp_path, PARCAE, "spot.csv")
    text = 'format = "arachne.trace/1"\n[counted]\nfile = "spot.csv"\nseed = {}\nnotice_s = 500\n'
    found, _ = read_trace(written(tmp_path, text.format(0)), cluster())
    assert found.events[1].notice_s == 180.0  # not before the start
    drawn = {read_trace(written(tmp_path, text.format(s)), cluster())[0].events[1].goes for s in range(9)}
    assert len(drawn) > 1


def test_drawn(tmp_path):
    text = """format = "arachne.trace/1"
duration_s = 1e6
[drawn]
seed = 3
mean_to_loss_s = 1e4
mean_repair_s = 2e3
"""
    found, _ = read_trace(written(tmp_path, text), cluster())
    losses = sum(len(event.goes) for event in found.events)
    assert 4 * 1e6 / 1.2e4 * 0.8 < losses < 4 * 1e6 / 1.2e4 * 1.2  # four nodes
    here = set(found.here)
    for event in found.events:
        assert set(event.goes) <= here
        assert not set(event.comes) & here
        here = here - set(event.goes) | set(event.comes)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.csv", "0,1\nx,2\n", "line 2  expected 'milliseconds,instances' in whole numbers, got 'x,2'"),
        ("a.csv", "0,1\n60000,1,2\n", "line 2  expected"),
        ("a.csv", "0,1\n60000,-1\n", "line 2  expected"),
        ("a.csv", "60000,1\n0,2\n", "line 2  0 s lies before 60 s of the row above"),
        ("a.csv", "0,1\n", "line 1  is the only moment"),
        ("a.csv", "", r"\$  says of no moment"),
        ("a.csv", "0,1\n60000,9\n", "line 2  9 are there, but the cluster has 4"),
        ("a.json", '[{"Time": 0}]', r'\$\[0\]  expected {"Time": seconds, "GPUs": number}'),
        ("a.json", '[{"Time": 0, "GPUs": true}]', r"\$\[0\]  expected"),
        ("a.json", '[{"Time": 5, "GPUs": 1}, {"Time": 3, "GPUs": 1}]', r"\$\[1\]  3 s lies before 5 s"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.json", "{", "is not JSON"),
        ("a.toml", OWN.replace("trace/1", "trace/2"), "newer"),
        ("a.toml", OWN.replace("goes", "goess"), r"\$\.event\[1\]\.goess"),
        ("a.toml", OWN.replace("at_s = 500", "at_s = 5"), r"\$\.event\[1\]\.at_s  5 s lies before 10 s"),
        ("a.toml", OWN.replace("at_s = 500", "at_s = 5000"), r"event\[1\]\.at_s  5000 s lies behind the end"),
        ("a.toml", OWN.replace('["a", "b-1"]', '["c"]'), r"goes\[0\]  the cluster has no node 'c'"),
        ("a.toml", OWN.replace('["a", "b-1"]', '["b-2"]'), r"\$\.event\[1\]\.goes\[0\]  b-2 is not there"),
        ("a.toml", OWN.replace('comes = ["b-1"]', 'comes = ["a"]'), r"event\[0\]\.comes\[0\]  a is there"),
        ("a.toml", OWN.replace("duration_s = 1000\n", ""), r"\$\.duration_s  missing"),
        ("a.toml", OWN.replace("duration_s = 1000", "duration_s = 0"), r"\$\.duration_s +0 s is not above 0"),
        ("a.toml", OWN.replace("start_s = 5", "start_s = -5"), r"\$\.costs\.start_s  -5 is below 0"),
        ("a.toml", OWN.replace("notice_s = 30", "notice_s = nan"), "finite"),
        ("a.toml", OWN + "[counted]\nfile = 'x.csv'\n", r"\$\.counted  stands beside \$\.event"),
        ("a.toml", "format = 'arachne.trace/1'\n[counted]\nfile = 'x.csv'\n", "x.csv is not a file"),
        (
            "a.toml",
            "format = 'arachne.trace/1'\nduration_s = 1\n[drawn]\nseed = 0\nmean_to_loss_s = 5\n",
            r"\$\.drawn\.mean_repair_s  missing beside mean_to_loss_s",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(tmp_path, name, text, fault):
    path = written(tmp_path, text, name)
    with pytest.raises(InvalidFileError, match=fault) as told:
        read_trace(path, cluster())
    assert str(tmp_path) in str(told.value)


def test_turns_come_in_order_and_who_goes_first_never_joins():
    from tests.traces import trace

    followed = trace(
        Event(at_s=50.0, goes=("n-0",), notice_s=20.0),
        Event(at_s=60.0, comes=("n-0",)),
        Event(at_s=65.0, goes=("n-0",)),
        Event(at_s=80.0, comes=("n-0",)),
        duration_s=100.0,
    )
    assert [(m.at_s, m.turn) for m in moments(followed, 10.0)] == [
        (30.0, Turn.NOTICE), (50.0, Turn.GOES), (60.0, Turn.COMES), (65.0, Turn.GOES), (80.0, Turn.COMES),
        (90.0, Turn.READY),
    ]  # fmt: skip


def test_a_cluster_node_by_node_keeps_its_links():
    entries = tuple(NodeEntry(name=n, device="A100-40", gpus=2, count=2) for n in ("a", "b"))
    slow = NetworkPair(between=("a", "b"), inter_GBps=1.0)
    whole = Cluster(node=entries, network=Network(inter_GBps=9.0, pair=(slow,)))
    single = node_by_node(whole)
    names = [node.name for node in whole.nodes]
    assert [node.name for node in single.nodes] == names == ["a-0", "a-1", "b-0", "b-1"]
    for x in names:
        assert [single.link(x, y).inter_GBps for y in names] == [whole.link(x, y).inter_GBps for y in names]
    assert with_nodes(single, {"a-0", "b-1"}).link("a-0", "b-1").inter_GBps == 1.0
    assert with_nodes(single, {"a-0", "a-1"}).network.pair == ()


def test_a_link_of_entries_that_are_in_zones_too_is_refused():
    entry = NodeEntry(name="a", device="A100-40", gpus=2, count=2, zone="z")
    network = Network(inter_GBps=9.0, pair=(NetworkPair(between=("a", "z"), inter_GBps=1.0),))
    with pytest.raises(UsageError, match="name the zone instead"):
        node_by_node(Cluster(node=(entry,), network=network))


PAGE = Path(__file__).parents[1] / "docs" / "simulating-traces.md"


def test_the_files_of_the_docs_can_be_read(tmp_path):
    blocks = PAGE.read_text().split("```toml\n")[1:]
    assert len(blocks) == 3
    entry = NodeEntry(name="a", device="A100-40", gpus=1, count=3)
    written(tmp_path, PARCAE, "spot.csv")
    for block in blocks:
        path = written(tmp_path, block.partition("```")[0])
        found, _ = read_trace(path, Cluster(node=(entry,), network=Network(inter_GBps=1)))
        assert found.events
