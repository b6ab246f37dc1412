"""The HTML page of a plan: well-formed, self-contained, one bar for each span, colours by pipeline, small."""

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.alike import alike
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch.report.markup import joined, tag
from launch.report.page import render_page
from launch.report.page.colours import _hex
from launch.report.page.lanes import bands, colours_of
from launch.report.page.timeline import MOST_BARS, WIDTH, timeline
from planner import catalog
from planner.cost import Estimate, price
from planner.request import Request
from tests.strategies import problems

TYPES = ("A100-40", "V100-16")
VOID = {"meta", "br", "rect"}
MOST_BYTES = 2_000_000


@dataclass
class Page(HTMLParser):
    """Every element with its attributes; fails where an end tag does not belong to the last open one."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def all(self, name: str, with_class: str = "") -> list[dict[str, str | None]]:
        wanted = set(with_class.split())
        return [
            a for tag, a in self.elements if tag == name and wanted <= set((a.get("class") or "").split())
        ]


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def stacked(copies: int, depth: int, micro_batches: int) -> tuple[Plan, Request]:
    """``copies`` pipelines of ``depth`` single devices of OPT-350M; the first half of the stages on V100."""
    early = depth // 2
    entries = (
        NodeEntry(name="v", device="V100-16", gpus=early, count=copies),
        NodeEntry(name="a", device="A100-40", gpus=depth - early, count=copies),
        NodeEntry(name="spare", device="A100-40", gpus=1),
    )
    cluster = Cluster(node=entries, network=Network(inter_GBps=12.5))
    cuts = [round(26 * s / depth) for s in range(depth + 1)]
    nodes = {n.entry.name: [m for m in cluster.nodes if m.entry.name == n.entry.name] for n in cluster.nodes}
    pipelines = tuple(
        Pipeline(
            micro_batches=micro_batches,
            micro_batch=1,
            stages=tuple(
                Stage(
                    layers=(cuts[s], cuts[s + 1]),
                    replicas=(
                        Replica(
                            devices=(
                                nodes["v"][p].devices[s] if s < early else nodes["a"][p].devices[s - early],
                            ),
                            share=1,
                        ),
                    ),
                )
                for s in range(depth)
            ),
        )
        for p in range(copies)
    )
    plan = Plan(model="opt-350m", global_batch=copies * micro_batches, sequence=2048, pipelines=pipelines)
    request = Request(
        cluster=cluster,
        model=catalog.model("opt-350m"),
        profile=catalog.profile("opt-350m"),
        global_batch=plan.global_batch,
    )
    return plan, request


def priced(plan: Plan, request: Request) -> Estimate:
    found = price(plan, request)
    assert isinstance(found, Estimate)
    return found


def test_a_page_is_whole_and_needs_nothing_else():
    plan, request = stacked(copies=2, depth=4, micro_batches=6)
    html = render_page(plan, priced(plan, request), request)
    page = parsed(html)
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    for words in ("opt-350m", "of the ideal", "Where the time goes", "Cluster", "One iteration", "Stages"):
        assert any(words in told for told in page.words)
    assert len(page.all("script")) == len(page.all("style")) == 1


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_span_of_every_lane_is_a_bar(data):
    plan, request = data.draw(problems(types=TYPES))
    estimate = priced(plan, request)
    shown = bands(plan, estimate, request.cluster)
    page = parsed(render_page(plan, estimate, request))
    lanes = [lane for band in shown for lane in band.lanes]
    bars = [a for a in page.all("rect") if a["class"] != "w"]
    assert len(bars) == sum(len(lane.spans) for lane in lanes)
    groups = page.all("g")
    assert [g["data-n"].split(" ") for g in groups] == [[s.name for s in lane.spans] for lane in lanes]
    assert sorted(p for band in shown for p in band.pipelines) == list(range(len(plan.pipelines)))
    replicas = {r.devices for p in plan.pipelines for s in p.stages for r in s.replicas}
    assert sum(lane.copies * len(band.pipelines) for band in shown for lane in band.lanes) == len(replicas)
    squares = page.all("i", "dev")
    assert len(squares) == len(request.cluster.devices)
    assert len(page.all("i", "dev idle")) == len(request.cluster.devices) - len(plan.devices)
    assert all(int(a["x"]) >= 0 and int(a["x"]) + int(a["width"]) <= WIDTH + 1 for a in bars)


def test_bars_do_not_overlap_and_leave_the_bubble_free():
    plan, request = stacked(copies=1, depth=4, micro_batches=2)
    estimate = priced(plan, request)
    page = parsed(render_page(plan, estimate, request))
    first, ends = True, 0
    for bar in page.all("rect"):
        if bar["class"] == "w":
            assert bar["width"] == str(WIDTH)
            first, ends = True, 0
            continue
        start = int(bar["x"])
        assert start >= ends - 1 or (first and start >= 0)
        first, ends = False, start + int(bar["width"])
    last_stage = page.all("g")[3]
    assert last_stage["data-n"].startswith("3F0 3B0 3F1 3B1")


def test_pipelines_have_hues_and_stages_shades():
    plan, request = stacked(copies=3, depth=4, micro_batches=4)
    colours = colours_of(plan, request.cluster)
    assert len({c for row in colours for c in row}) == 12
    page = parsed(render_page(plan, priced(plan, request), request))
    used = [a["style"].removeprefix("background:") for a in page.all("i", "dev") if a.get("style")]
    assert Counter(used) == dict.fromkeys((c for row in colours for c in row), 1)
    assert [g["style"] for g in page.all("g")] == [f"--c:{c}" for c in colours[0]]


def test_many_alike_pipelines_share_a_hue():
    plan, request = stacked(copies=16, depth=2, micro_batches=1)
    colours = colours_of(plan, request.cluster)
    assert all(row == colours[0] for row in colours)


def test_oklch_to_srgb():
    assert _hex(0.62796, 0.25768, 29.234) == "#ff0000"  # sRGB's red in OKLCH, by CSS Color 4
    assert _hex(1.0, 0.0, 0.0) == "#ffffff"


def test_a_page_of_512_devices_is_small_and_quick():
    plan, request = stacked(copies=64, depth=8, micro_batches=64)
    assert len(plan.devices) == 512
    estimate = priced(plan, request)
    started = time.process_time()
    html = render_page(plan, estimate, request)
    assert time.process_time() - started < 2.0
    assert len(html.encode()) < MOST_BYTES
    assert len(bands(plan, estimate, request.cluster)) < len(alike(plan)) + 4
    assert len(parsed(html).all("i", "dev")) == 513


def test_lanes_beyond_what_a_browser_draws_are_counted():
    plan, request = stacked(copies=1, depth=8, micro_batches=2000)
    shown = bands(plan, priced(plan, request), request.cluster)
    drawn = timeline(shown, 1.0, request.cluster)
    assert len(shown[0].lanes[0].spans) > MOST_BARS / 6
    assert drawn.left_out == 3
    assert len(drawn.html) < MOST_BYTES


def test_text_is_escaped():
    assert tag("p", "a < b & c", title='"x"') == '<p title="&quot;x&quot;">a &lt; b &amp; c</p>'
    assert joined(["<", tag("br")]) == "&lt;<br>"


@pytest.mark.parametrize("name", ["page.js", "style.css"])
def test_script_and_style_cannot_end_their_element(name):
    from importlib import resources

    assert "</" not in (resources.files("launch.report.page") / name).read_text()
