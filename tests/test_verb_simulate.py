"""``arachne simulate`` as a person runs it: the same price, another network, another profile, no room."""

import json
import re

import msgspec
import pytest

from arachne_runtime.errors import ExitCode, UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.plan.files import read_plan, write
from arachne_runtime.plan.profile import LinkPoint, LinkScope, LinkTiming
from planner.cost import price
from planner.explain import with_network
from planner.request import Request
from tests.test_verb_plan import CLUSTER, arachne, folder, model, planned, profile  # noqa: F401 - a fixture

FILES = ("--cluster", "cluster.toml", "--model", "model.json", "--profile", "profile.json")
OPTIONS = {"--cluster", "--model", "--profile", "--inter-gbps", "--latency-us", "--trace", "--out", "--json"}


@pytest.fixture
def place(folder):  # noqa: F811
    """Where a plan lies beside what it was made from."""
    write(planned(12), folder / "plan.json")
    return folder


def test_options_are_frozen(tmp_path):
    told = re.findall(r"^ +(--[a-z-]+)", arachne(tmp_path, "simulate", "--help").stdout, re.MULTILINE)
    assert set(told) - {"--help"} == OPTIONS


def test_a_plan_is_priced_as_it_was_made(place):
    done = arachne(place, "simulate", "plan.json", *FILES)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("plan.json: small on ")
    assert "\nas predicted in the plan's file: " in done.stdout
    assert "another" not in done.stdout
    answer = json.loads(arachne(place, "simulate", "plan.json", *FILES, "--json").stdout)
    predicted = read_plan(place / "plan.json").predicted
    assert answer["price"]["iteration_s"] == answer["against"]["predicted_s"] == predicted.iteration_s
    assert answer["against"]["ratio"] == 1.0
    assert answer["against"]["changed"] == answer["assumed"] == []
    for parts in answer["price"]["breakdown"].values():
        assert sum(parts.values()) == pytest.approx(predicted.iteration_s)


def test_another_network_is_assumed(place):
    done = arachne(place, "simulate", "plan.json", *FILES, "--inter-gbps", "0.001", "--latency-us", "5")
    assert "  assumed: 0.001 GB/s between nodes\n  assumed: 5 µs between nodes\n" in done.stdout
    assert re.search(r"predicted in the plan's file: .*; now .*, \+\d", done.stdout)
    assert "made from another" not in done.stdout
    done = arachne(place, "simulate", "plan.json", *FILES, "--inter-gbps", "0")
    assert done.returncode == ExitCode.USAGE
    assert "bandwidth between nodes 0 GB/s is not above 0" in done.stderr


def test_another_profile_is_told(place):
    slower = [msgspec.structs.replace(t, forward_s=2 * t.forward_s) for t in profile().timings]
    write(msgspec.structs.replace(profile(), timings=tuple(slower)), place / "slower.json")
    done = arachne(place, "simulate", "plan.json", *FILES[:-1], "slower.json")
    assert re.search(r"now .*, \+3\d\.\d %", done.stdout)  # a forward is a third of the work
    assert "  made from another profile\n" in done.stdout


def test_a_plan_that_does_not_fit_is_4(place):
    (place / "cluster.toml").write_text(CLUSTER.format(memory=0.38))
    done = arachne(place, "simulate", "plan.json", *FILES)
    assert done.returncode == ExitCode.NO_FEASIBLE_PLAN
    assert "does not fit: device" in done.stdout
    answer = json.loads(arachne(place, "simulate", "plan.json", *FILES, "--json").stdout)
    assert answer["price"] is answer["against"] is None
    assert answer["infeasible"]["needed_bytes"] > answer["infeasible"]["available_bytes"]


def test_a_plan_without_a_prediction(place):
    plan = read_plan(place / "plan.json")
    write(msgspec.structs.replace(plan, predicted=None, made_by=None), place / "bare.json")
    done = arachne(place, "simulate", "bare.json", *FILES)
    assert done.stdout.endswith("the plan's file predicts nothing\n")


# --- a trace

TRACE = """format = "arachne.trace/1"
duration_s = 3600
[[event]]
at_s = 1000
goes = ["slow"]
[[event]]
at_s = 1800
comes = ["slow"]
[costs]
start_s = 5
"""
TRACED = ("simulate", "plan.json", *FILES, "--trace", "trace.toml")


@pytest.fixture
def traced(place):
    """With a trace in which the slow node goes for a while."""
    (place / "trace.toml").write_text(TRACE)
    return place


def test_a_trace_is_replayed_under_every_policy(traced):
    done = arachne(traced, *TRACED)
    assert (done.returncode, done.stderr) == (0, "")
    assert "trace.toml: 60.0 min of small, global batch 12, at most 4 devices" in done.stdout
    shares = re.findall(r"^  ([a-z ]+?)  .* ([0-9.]+) %  ", done.stdout, re.MULTILINE)
    assert [name for name, _ in shares] == [
        "oracle", "ours", "fixed horizon", "always change", "restart", "never change",
    ]  # fmt: skip


def test_a_trace_as_json_and_as_a_page(traced):
    done = arachne(traced, *TRACED, "--out", "page.html", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["replayed"]["devices"] == [[0.0, 4], [1000.0, 2], [1800.0, 4]]
    assert answer["replayed"]["costs"]["start_s"] == 5
    by_policy = {outcome["policy"]: outcome for outcome in answer["replayed"]["outcomes"]}
    assert by_policy["never change"]["seconds"]["waiting"] == pytest.approx(1805.2 - 1002.2)
    page = (traced / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    for name, outcome in by_policy.items():
        assert f"<title>{name}: {outcome['samples']:,.0f} samples</title>" in page
        assert page.count(f"<title>{name}, ") == len(outcome["changes"])


def test_a_trace_as_a_picture(traced):
    assert arachne(traced, *TRACED, "--out", "curves.png").returncode == 0
    assert (traced / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_usage_of_a_trace(traced):
    done = arachne(traced, *TRACED, "--out", "curves.pdf")
    assert done.returncode == ExitCode.USAGE
    assert "curves.pdf ends neither in .html nor in .png" in done.stderr
    done = arachne(traced, "simulate", "plan.json", *FILES, "--out", "page.html")
    assert done.returncode == ExitCode.USAGE
    assert "--out writes what a trace gives: give --trace" in done.stderr
    (traced / "trace.toml").write_text(TRACE.replace('goes = ["slow"]', 'goes = ["fast"]'))
    done = arachne(traced, *TRACED)
    assert done.returncode == ExitCode.INVALID_FILE
    assert "trace.toml: 2 problems\n  $.event[0].goes[0]   the cluster has no node 'fast'" in done.stderr


# --- the assumed network


def linked() -> Request:
    """Two nodes in a zone with a slow pair, and links that were measured."""
    entry = NodeEntry(name="n", device="cpu", gpus=1, count=2)
    pair = NetworkPair(between=("n", "n"), inter_GBps=0.5, latency_us=100.0)
    points = (LinkPoint(bytes=1000, seconds=1.0),)
    links = tuple(LinkTiming(between=("cpu", "cpu"), scope=scope, points=points) for scope in LinkScope)
    return Request(
        cluster=Cluster(node=(entry,), network=Network(inter_GBps=1.0, pair=(pair,))),
        model=model(),
        profile=msgspec.structs.replace(profile(), links=links),
        global_batch=4,
    )


def test_an_assumed_network_holds_for_every_pair_and_in_place_of_what_was_measured():
    request = with_network(linked(), inter_GBps=8.0)
    link = request.fleet.link("n-0", "n-1")
    assert link.seconds_per_byte == pytest.approx(1 / 8e9)
    assert link.latency_s == pytest.approx(100e-6)
    assert link.curves == ()
    assert [timing.scope for timing in request.profile.links] == [LinkScope.INTRA]
    assert with_network(linked(), latency_us=1.0).fleet.link("n-0", "n-1").latency_s == pytest.approx(1e-6)


def test_nothing_assumed_is_the_same_problem():
    request = linked()
    assert with_network(request) is request


@pytest.mark.parametrize(
    "wrong",
    [{"inter_GBps": -1.0}, {"latency_us": -1.0}, {"inter_GBps": float("nan")}, {"latency_us": float("inf")}],
)
def test_a_network_that_cannot_be_is_refused(wrong):
    with pytest.raises(UsageError, match="between nodes"):
        with_network(linked(), **wrong)


def test_a_faster_network_never_makes_a_plan_slower(place):
    plan = read_plan(place / "plan.json")
    request = Request(
        cluster=msgspec.convert(
            {
                "format": "arachne.cluster/1",
                "node": [
                    {"name": "quick", "device": "cpu", "gpus": 2},
                    {"name": "slow", "device": "cpu-0.25", "gpus": 2},
                ],
                "network": {"inter_GBps": 1.0},
            },
            Cluster,
        ),
        model=model(),
        profile=profile(),
        global_batch=plan.global_batch,
    )
    seconds = [
        price(plan, with_network(request, inter_GBps=GBps)).iteration_s for GBps in (0.01, 0.1, 1.0, 10.0)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
