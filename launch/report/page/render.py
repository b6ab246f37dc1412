"""Puts the page together: headline, losses, cluster map, timeline, stages with their memory, notes."""

from collections.abc import Sequence

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import Plan
from planner.cost import Estimate
from planner.request import Request

from ..answers import PriceAnswer, price_answer
from ..markup import Markup, joined, tag
from .fleet import cluster_map
from .headline import header, losses_bar
from .lanes import Band, bands
from .shell import file_text, section, whole_page
from .stages import stage_table
from .timeline import KEY, timeline


def render_page(plan: Plan, estimate: Estimate, request: Request) -> str:
    """The whole page of a priced plan."""
    price = price_answer(plan, estimate, request)
    shown = bands(plan, estimate, request.cluster)
    body = joined(
        header(plan, price, request),
        section("Where the time goes", losses_bar(price.losses)),
        section("Cluster", cluster_map(plan, price, request)),
        section("One iteration", _timeline(shown, price, request.cluster)),
        section("Stages", stage_table(shown, price, request)),
        section("Notes", _notes(plan, price)),
        tag("div", id="tip", hidden=""),
    )
    return whole_page(f"{plan.model}: plan", body, script=file_text("page.js"))


def _timeline(shown: Sequence[Band], price: PriceAnswer, cluster: Cluster) -> Markup:
    drawn = timeline(shown, price.iteration_s, cluster)
    key = [tag("li", tag("i", class_=f"key {letter}"), name) for letter, name in KEY.items()]
    buttons = [
        tag("button", word, type="button", data_zoom=how)
        for how, word in (("in", "+"), ("out", "−"), ("all", "all"))
    ]
    note = f"{drawn.left_out} further lanes are not drawn; arachne show --trace has all of them. "
    return joined(
        tag("div", tag("ul", key, class_="legend"), tag("div", buttons, class_="zoom"), class_="bar"),
        tag("div", drawn.html, tag("div", class_="axis", id="axis"), class_="timeline"),
        tag("p", note if drawn.left_out else "", "Drag to zoom, double-click to see all.", class_="dim"),
    )


def _notes(plan: Plan, price: PriceAnswer) -> Markup:
    lines = [f"Limited by: {price.limits}.", *(f"Binds: {binding}." for binding in price.binds)]
    lines.append("Figures: " + ", ".join(f"{f.device} {f.source}" for f in price.figures) + ".")
    lines += [f"Not measured: {what}." for what in price.not_measured]
    if plan.made_by is not None:
        lines.append(f"Made by {plan.made_by.solver} {plan.made_by.version}, seed {plan.made_by.seed}.")
    return tag("ul", [tag("li", line) for line in lines], class_="notes")
