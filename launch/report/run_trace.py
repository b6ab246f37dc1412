"""One recorded step under its price, in Chrome's trace format: each device as predicted, then as measured.

Ranks' clocks start apart, but all leave the commit word together: every rank is shifted so that its own ends
there. Collectives lie within their actions. Waiting and sending are slices of their own: a slice named
like an action is its computing, as in the price.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from arachne_runtime.plan.cluster import index_of, node_of
from arachne_runtime.plan.placement import places, rank_order
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import WARM_UP_STEPS, Record, RecordKind
from arachne_runtime.units import Seconds
from planner.cost import Span

from .chrome_trace import Trace, TraceEvent, microseconds

PREDICTED, MEASURED = "predicted", "measured"
LANES = (PREDICTED, MEASURED)
"""Of each device, from above."""


def run_trace(plan: Plan, records: Sequence[Record], timeline: Mapping[str, Sequence[Span]]) -> bytes:
    """The step of the median time, over the ``timeline`` by device (empty: there is no price)."""
    typical = _typical_step(records)
    peaks = {(r.rank): r.peak_bytes for r in records if r.kind is RecordKind.MEMORY}
    mine = [record for record in records if record.step == typical]
    events = [*_names(plan), *_predicted(plan, timeline), *_measured(plan, mine, peaks)]
    return msgspec.json.encode(Trace(trace_events=tuple(events))) + b"\n"


def _typical_step(records: Sequence[Record]) -> int:
    """Behind the warm-up, the one nearest to the median time; of equals the first."""
    steps = sorted({record.step for record in records})
    counted = steps[min(WARM_UP_STEPS, len(steps) - 1) :]
    took = {step: max((_whole(r) for r in records if r.step == step), default=0.0) for step in counted}
    middle = statistics.median(took.values())
    return min(counted, key=lambda step: abs(took[step] - middle))


def _whole(record: Record) -> Seconds:
    return record.start_s + record.wait_s + record.compute_s + record.transfer_s


def _names(plan: Plan) -> Iterator[TraceEvent]:
    for device in rank_order(plan):
        for lane in LANES:
            pid, tid = _lane(plan, device, lane)
            yield TraceEvent(name="process_name", ph="M", pid=pid, tid=tid, args={"name": node_of(device)})
            yield TraceEvent(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": f"{device} {lane}"})
            yield TraceEvent(name="thread_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": tid})


def _lane(plan: Plan, device: str, lane: str) -> tuple[int, int]:
    """Process and thread: nodes as they first appear in the plan, two threads a device."""
    nodes = list(dict.fromkeys(node_of(name) for name in plan.devices))
    return nodes.index(node_of(device)), len(LANES) * index_of(device) + LANES.index(lane)


def _predicted(plan: Plan, timeline: Mapping[str, Sequence[Span]]) -> Iterator[TraceEvent]:
    for device, spans in timeline.items():
        for span in spans:
            yield _slice(plan, device, PREDICTED, span.kind.value, span.name, span.start_s, span.end_s)


def _measured(plan: Plan, records: Sequence[Record], peaks: Mapping[int, int]) -> Iterator[TraceEvent]:
    ends = {record.rank: _whole(record) for record in records if record.kind is RecordKind.COMMIT}
    devices = {place.rank: place.device for place in places(plan)}
    latest = max(ends.values(), default=0.0)
    for record in records:
        if record.rank in devices and record.kind not in (RecordKind.MEMORY, RecordKind.STEP):
            shift_s = latest - ends.get(record.rank, latest)
            yield from _slices(plan, devices[record.rank], record, shift_s)
    for rank, peak in sorted(peaks.items()):
        if rank in devices:
            pid, tid = _lane(plan, devices[rank], MEASURED)
            args: dict[str, str | int] = {"bytes": peak}
            yield TraceEvent(name=f"peak memory {devices[rank]}", ph="C", pid=pid, tid=tid, args=args)


def _slices(plan: Plan, device: str, record: Record, shift_s: Seconds) -> Iterator[TraceEvent]:
    """Waiting, computing and sending of one record; what only waits is named after itself."""
    kind = record.kind.value
    parts = [
        (f"waits for {record.name}", "wait", record.wait_s),
        (record.name, kind, record.compute_s),
        (f"sends of {record.name}", "send", record.transfer_s),
    ]
    if record.compute_s == record.transfer_s == 0:
        parts = [(record.name, kind, record.wait_s)]
    start_s = record.start_s + shift_s
    for name, cat, seconds in parts:
        if seconds > 0:
            yield _slice(plan, device, MEASURED, cat, name, start_s, start_s + seconds)
        start_s += seconds


def _slice(
    plan: Plan, device: str, lane: str, cat: str, name: str, start_s: Seconds, end_s: Seconds
) -> TraceEvent:
    pid, tid = _lane(plan, device, lane)
    start_us, end_us = microseconds(start_s), microseconds(end_s)
    return TraceEvent(
        name=name, ph="X", cat=cat, pid=pid, tid=tid, ts=start_us, dur=round(end_us - start_us, 3)
    )
