"""The timeline of one iteration: an SVG of bars, one for each span, that the page's script zooms."""

from collections.abc import Sequence
from dataclasses import dataclass

from arachne_runtime.plan.alike import numbers
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.plan.schedule import Action, Work
from arachne_runtime.units import Seconds
from planner.cost import Span

from ..markup import Markup, joined, tag
from .lanes import Band, Lane

WIDTH = 100_000
"""Units of the whole iteration: whole numbers are short, and 1/100,000 is finer than any screen."""

LANE_PX, HEAD_PX = 22, 26
MOST_BARS = 24_000
"""Of 45 bytes each: about 1 MB, which browsers draw in well under a second."""

_BY_WORK = {Work.FORWARD: "f", Work.BACKWARD: "b", Work.INPUT: "b", Work.WEIGHT: "g"}
KEY = {
    "f": "forward",
    "b": "backward",
    "g": "gradient of weights",
    "r": "sum of gradients",
    "u": "optimizer",
    "w": "waiting",
}
"""Classes of bars and what they are."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The drawn timeline."""

    html: Markup
    left_out: int
    """Lanes for which there was no room."""


def timeline(bands: Sequence[Band], iteration_s: Seconds, cluster: Cluster) -> Timeline:
    """Labels beside bars: lanes in order while there is room."""
    labels: list[Markup] = []
    drawn: list[Markup] = []
    top = bars = left_out = 0
    for band in bands:
        fitting = []
        for lane in band.lanes:
            bars += len(lane.spans)
            if bars <= MOST_BARS:
                fitting.append(lane)
            else:
                left_out += 1
        if not fitting:
            continue
        labels.append(tag("div", _head(band), class_="band"))
        top += HEAD_PX
        for lane in fitting:
            labels.append(_label(lane, cluster))
            drawn.append(_bars(lane, top, iteration_s))
            top += LANE_PX
    svg = tag(
        "svg",
        drawn,
        id="bars",
        viewBox=f"0 0 {WIDTH} {top}",
        height=top,
        preserveAspectRatio="none",
        role="img",
        aria_label="Timeline of one iteration",
        data_seconds=repr(iteration_s),
    )
    return Timeline(joined(tag("div", labels, class_="labels"), tag("div", svg, class_="track")), left_out)


def _head(band: Band) -> str:
    work = f"{band.first.micro_batches} × {band.first.micro_batch} samples"
    if len(band.pipelines) == 1:
        return f"pipeline {band.pipelines[0]} · {work}"
    return f"{len(band.pipelines)} × pipeline ({numbers(band.pipelines)}) · {work} each"


def _label(lane: Lane, cluster: Cluster) -> Markup:
    device = cluster.device_type(lane.devices[0])
    tensor = f" TP {len(lane.devices)}" if len(lane.devices) > 1 else ""
    copies = f"{lane.copies} × " if lane.copies > 1 else ""
    return tag(
        "div",
        tag("i", style=f"background:{lane.colour}"),
        f"{numbers(lane.stages)}: {copies}{device}{tensor}",
        class_="lane",
        title=f"stage {numbers(lane.stages)}, {' '.join(lane.devices)}",
    )


def _bars(lane: Lane, top: int, iteration_s: Seconds) -> Markup:
    """Names stand in the group, in the order of the bars, for the script that tells them."""
    scale = WIDTH / iteration_s
    return tag(
        "g",
        tag("rect", class_="w", width=WIDTH),
        [_bar(span, scale) for span in lane.spans],
        transform=f"translate(0 {top + 2})",
        style=f"--c:{lane.colour}",
        data_n=" ".join(span.name.replace(" ", "_") for span in lane.spans),
        data_lane=f"stage {numbers(lane.stages)}, {lane.devices[0]}",
    )


def _bar(span: Span, scale: float) -> Markup:
    start = round(span.start_s * scale)
    width = max(1, round(span.end_s * scale) - start)
    return Markup(f'<rect class="{_class(span)}" x="{start}" width="{width}"/>')


def _class(span: Span) -> str:
    """The CSS class of a bar, one of ``KEY``."""
    if span.kind is RecordKind.ACTION:
        return _BY_WORK[Action.parse(span.name).work]
    return "r" if span.kind is RecordKind.REDUCE else "u"
