"""The Chrome trace of a timeline, read back as a viewer does."""

import json

import pytest

from launch.report.chrome_trace import chrome_trace
from tests.test_page import priced, stacked


def test_the_trace_holds_every_span_of_every_device():
    plan, request = stacked(copies=2, depth=4, micro_batches=3)
    estimate = priced(plan, request)
    trace = json.loads(chrome_trace(estimate.timeline, request.cluster))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert set(names.values()) == {f"{d} {request.cluster.device_type(d)}" for d in plan.devices}
    nodes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    read: dict[str, list[tuple[str, str, float, float]]] = {}
    for event in trace["traceEvents"]:
        assert set(event) >= {"name", "ph", "pid", "tid"}
        if event["ph"] == "X":
            device = names[event["pid"], event["tid"]].split()[0]
            assert device.split(":")[0] == nodes[event["pid"]]
            start = event.get("ts", 0.0) / 1e6
            read.setdefault(device, []).append(
                (event["cat"], event["name"], start, start + event.get("dur", 0.0) / 1e6)
            )
        else:
            assert event["ph"] == "M"
    assert set(read) == set(estimate.timeline)
    for device, spans in estimate.timeline.items():
        for (kind, name, start, end), span in zip(read[device], spans, strict=True):
            assert (kind, name) == (span.kind, span.name)
            assert (start, end) == pytest.approx((span.start_s, span.end_s), abs=2e-9)
