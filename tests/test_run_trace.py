"""A recorded step over its price in one Chrome trace, read back as a viewer does."""

import json

import pytest

from arachne_runtime.errors import UsageError
from arachne_runtime.plan import files
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.records import Record, RecordKind
from launch.report.run_trace import run_trace
from tests.test_measure_runs import TIMELINE, compare, step_of, two_stages, write

TYPES = {"X", "M", "C"}


def records(plan, steps=4):
    found = []
    for step in range(steps):
        for rank in (0, 1):
            found += step_of(rank, step, plan)
            at = {"rank": rank, "step": step, "plan": digest(plan)}
            found.append(
                Record(kind=RecordKind.COLLECTIVE, name="ep all_to_all", start_s=1.7, wait_s=0.2, **at)
            )
            # rank 1 began its step a second later than rank 0, by whose clock the commit word ends at 9.5
            found.append(Record(kind=RecordKind.COMMIT, name="commit", start_s=8.6 - rank, wait_s=0.9, **at))
            found.append(
                Record(kind=RecordKind.MEMORY, name="memory", start_s=0.0, peak_bytes=1000 + rank, **at)
            )
    return found


def lanes(trace):
    """Slices by the name of their lane."""
    names, slices = {}, {}
    for event in trace["traceEvents"]:
        assert set(event) >= {"name", "ph", "pid", "tid"}
        assert event["ph"] in TYPES
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = event.get("ts", 0.0) / 1e6
            end = start + event.get("dur", 0.0) / 1e6
            slices.setdefault(names[event["pid"], event["tid"]], []).append(
                (event["name"], event["cat"], start, end)
            )
    return names, slices


def test_each_device_has_its_prediction_above_its_measurement():
    plan = two_stages()
    trace = json.loads(run_trace(plan, records(plan), TIMELINE))
    names, slices = lanes(trace)
    assert sorted(names.values()) == ["a:0 measured", "a:0 predicted", "b:0 measured", "b:0 predicted"]
    order = {
        names[e["pid"], e["tid"]]: e["args"]["sort_index"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_sort_index"
    }
    assert order["a:0 predicted"] < order["a:0 measured"]
    predicted = [(name, start, end) for name, _, start, end in slices["b:0 predicted"]]
    assert predicted == [(s.name, pytest.approx(s.start_s), pytest.approx(s.end_s)) for s in TIMELINE["b:0"]]


def test_waiting_computing_and_sending_are_told_apart_and_one_step_is_drawn():
    plan = two_stages()
    _, slices = lanes(json.loads(run_trace(plan, records(plan), {})))
    assert set(slices) == {"a:0 measured", "b:0 measured"}
    found = {name: (cat, start, end) for name, cat, start, end in slices["a:0 measured"]}
    assert len(found) == len(slices["a:0 measured"])  # no action twice: one step
    assert found["waits for 0B0"] == ("wait", pytest.approx(1.1), pytest.approx(1.6))
    assert found["0B0"] == ("action", pytest.approx(1.6), pytest.approx(3.6))
    assert found["sends of 0F1"] == ("send", pytest.approx(5.0), pytest.approx(5.1))
    assert found["0:2"][0] == "reduce"
    assert found["commit"] == ("commit", pytest.approx(8.6), pytest.approx(9.5))
    inner = found["ep all_to_all"]
    assert found["0B0"][1] <= inner[1] < inner[2] <= found["0B0"][2]


def test_clocks_meet_at_the_commit_word():
    plan = two_stages()
    _, slices = lanes(json.loads(run_trace(plan, records(plan), {})))
    ends = {lane: end for lane, found in slices.items() for name, _, _, end in found if name == "commit"}
    assert ends["a:0 measured"] == pytest.approx(ends["b:0 measured"]) == pytest.approx(9.5)
    first = min(start for _, _, start, _ in slices["b:0 measured"])
    assert first == pytest.approx(1.0)


def test_peaks_of_memory_are_counters():
    plan = two_stages()
    trace = json.loads(run_trace(plan, records(plan), {}))
    peaks = {e["name"]: e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert peaks == {"peak memory a:0": 1000, "peak memory b:0": 1001}


def test_arachne_compare_writes_the_trace(tmp_path):
    plan = two_stages(predicted_s=8.0)
    files.write(plan, tmp_path / "plan.json")
    write(tmp_path, records(plan))
    code, _, _ = compare(tmp_path / "plan.json", "--run", tmp_path, "--trace", tmp_path / "out.json")
    assert code == 0
    _, slices = lanes(json.loads((tmp_path / "out.json").read_text()))
    assert "0F0" in [name for name, *_ in slices["a:0 measured"]]
    _, _, error = compare(tmp_path / "plan.json", "--trace", tmp_path / "out.json")
    assert isinstance(error, UsageError)
    assert "--run" in str(error)
