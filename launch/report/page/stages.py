"""The table of stages: blocks, devices, where their seconds go, memory against capacity."""

from collections.abc import Iterator, Sequence

from arachne_runtime.plan.alike import numbers
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Stage
from arachne_runtime.units import format_bytes, format_seconds
from planner.explain.binding import FULL
from planner.request import Request

from ..answers import PriceAnswer
from ..markup import Markup, joined, tag
from .lanes import Band, Lane


def stage_table(shown: Sequence[Band], price: PriceAnswer, request: Request) -> Markup:
    """A row for each lane, under the pipelines that it stands for."""
    heads = ("stage", "blocks", "devices", "share", "compute", "bubble", "hop", "sync", "update", "memory")
    rows = [row for band in shown for row in _rows(band, price, request)]
    return tag(
        "div",
        tag("table", tag("thead", tag("tr", [tag("th", h) for h in heads])), tag("tbody", rows)),
        class_="scroll",
    )


def _rows(band: Band, price: PriceAnswer, request: Request) -> Iterator[Markup]:
    plural = "s" if len(band.pipelines) > 1 else ""
    work = f"{band.first.micro_batches} × {band.first.micro_batch} samples"
    title = f"pipeline{plural} {numbers(band.pipelines)}: {work}"
    yield tag("tr", tag("th", title, colspan=10), class_="band")
    for lane in band.lanes:
        yield _row(lane, [band.first.stages[s] for s in lane.stages], price, request)


def _row(lane: Lane, stages: Sequence[Stage], price: PriceAnswer, request: Request) -> Markup:
    device = lane.devices[0]
    parts = price.breakdown[device]
    seconds = (parts.compute_s, parts.bubble_s, parts.hop_s, parts.sync_s, parts.update_s)
    tensor = f" TP {len(lane.devices)}" if len(lane.devices) > 1 else ""
    return tag(
        "tr",
        tag("td", tag("i", style=f"background:{lane.colour}"), numbers(lane.stages)),
        tag("td", _blocks(stages)),
        tag("td", f"{lane.copies} × {request.cluster.device_type(device)}{tensor}"),
        tag("td", str(lane.share)),
        [tag("td", format_seconds(s)) for s in seconds],
        tag("td", _memory(device, price, request)),
    )


def _blocks(stages: Sequence[Stage]) -> str:
    runs = [(stage.layers[0], stage.layers[1] - 1) for stage in stages]
    words = [", ".join(f"{first}–{last}" if last > first else str(first) for first, last in runs)]
    if stages[0].recompute:
        words.append("recompute")
    if stages[0].zero:
        words.append(f"ZeRO {stages[0].zero}")
    return " · ".join(words)


def _memory(device: str, price: PriceAnswer, request: Request) -> Markup:
    """A bar of the peak against the device's capacity."""
    room, peak = request.fleet.node(node_of(device)).memory_bytes, price.peak_bytes[device]
    part = 100 * peak / room
    fill = tag("div", style=f"width:{part:.1f}%", class_="full" if part >= 100 * FULL else None)
    return joined(
        tag("div", fill, class_="memory"), tag("small", f"{format_bytes(peak)} of {format_bytes(room)}")
    )
