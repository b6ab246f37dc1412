"""A timeline in Chrome's trace format (chrome://tracing, Perfetto): a process a node, a thread a device.

Format: "Trace Event Format", Google, 2016: complete events (``X``), counters (``C``) and names (``M``), times
in microseconds.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from arachne_runtime.plan.cluster import Cluster, index_of, node_of
from arachne_runtime.units import Seconds
from planner.cost import Span


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event."""

    name: str
    ph: str
    """``X``: took a while; ``C``: counts something; ``M``: names a process or thread."""
    pid: int
    """The node, by its position in the cluster."""
    tid: int
    """The device's index in its node."""
    cat: str = ""
    ts: float = 0.0
    """Start in microseconds."""
    dur: float = 0.0
    args: dict[str, str | int] = {}


class Trace(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole file."""

    trace_events: tuple[TraceEvent, ...]
    display_time_unit: str = "ms"


def chrome_trace(timeline: Mapping[str, Sequence[Span]], cluster: Cluster) -> bytes:
    """Every span of every device of a timeline."""
    order = {node.name: pid for pid, node in enumerate(cluster.nodes)}
    events = [event for device, spans in timeline.items() for event in _events(device, spans, order, cluster)]
    return msgspec.json.encode(Trace(trace_events=tuple(events))) + b"\n"


def _events(
    device: str, spans: Sequence[Span], order: Mapping[str, int], cluster: Cluster
) -> Iterator[TraceEvent]:
    node, tid = node_of(device), index_of(device)
    pid = order[node]
    named = {"process_name": node, "thread_name": f"{device} {cluster.device_type(device)}"}
    for what, name in named.items():
        yield TraceEvent(name=what, ph="M", pid=pid, tid=tid, args={"name": name})
    for span in spans:
        yield TraceEvent(
            name=span.name,
            ph="X",
            cat=span.kind.value,
            pid=pid,
            tid=tid,
            ts=microseconds(span.start_s),
            dur=microseconds(span.end_s - span.start_s),
        )


def microseconds(seconds: Seconds) -> float:
    """To the nanosecond, which is as fine as the format goes."""
    return round(seconds * 1e6, 3)
