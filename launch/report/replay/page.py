"""The page of a simulation: headline, curves, and a table of what every policy's time went into."""

from collections.abc import Mapping

from arachne_runtime.units import Seconds, significant
from launch.simulation.ledger import Spent
from launch.simulation.outcome import Outcome, Replayed

from ..markup import Markup, joined, tag
from ..page.shell import section, whole_page
from .chart import chart, colour
from .text import hours

STYLE = """
.replay { display: block; width: 100%; height: auto } .replay text { font-size: 11px; fill: var(--dim) }
.replay .grid { stroke: var(--line); stroke-width: 1 } .replay .curve { fill: none; stroke-width: 1.8 }
.replay .dashed { stroke-dasharray: 5 4 } .replay .mark { stroke-width: 2 }
.replay .there { fill: var(--track); stroke: var(--sum); stroke-width: 1 }
td.number, th.number { text-align: right }
"""


def render_replay(replayed: Replayed) -> str:
    """The whole page."""
    return whole_page(
        f"{replayed.model}: {replayed.trace}",
        _header(replayed),
        section("Samples trained", _legend(replayed), chart(replayed)),
        section("Where the time goes", tag("div", _table(replayed), class_="scroll")),
        section("What is assumed", _assumed(replayed.costs)),
        style=STYLE,
    )


def _header(replayed: Replayed) -> Markup:
    oracle, ours, *_ = replayed.outcomes
    tiles = [
        (f"{100 * ours.of_oracle:.1f} %", f"of the oracle's samples, {ours.policy}"),
        (f"{ours.samples:,.0f}", f"samples of {oracle.samples:,.0f}"),
        (str(len(ours.changes)), "changes of plan"),
        (str(replayed.losses), "times a node went"),
        (str(replayed.joins), "times one came"),
    ]
    return tag(
        "header",
        tag("h1", replayed.model),
        tag("p", f"{replayed.trace}: {hours(replayed.duration_s)}, up to {replayed.most_devices} devices"),
        tag("p", f"global batch {replayed.global_batch}", class_="dim"),
        tag("div", [tag("div", tag("b", n), tag("span", what)) for n, what in tiles], class_="tiles"),
    )


def _legend(replayed: Replayed) -> Markup:
    keys = [
        tag("li", tag("i", style=f"background:{colour(n)}"), o.policy, tag("b", f"{100 * o.of_oracle:.1f} %"))
        for n, o in enumerate(replayed.outcomes)
    ]
    return tag("ul", keys, class_="legend")


def _table(replayed: Replayed) -> Markup:
    heads = ["", "samples", "of the oracle", "changes", *(spent.value for spent in Spent)]
    return tag(
        "table",
        tag("thead", tag("tr", [tag("th", head, class_="number" if head else None) for head in heads])),
        tag("tbody", [_row(o, n, replayed) for n, o in enumerate(replayed.outcomes)]),
    )


def _row(outcome: Outcome, number: int, replayed: Replayed) -> Markup:
    figures = [f"{outcome.samples:,.0f}", f"{100 * outcome.of_oracle:.2f} %", str(len(outcome.changes))]
    figures += [f"{100 * outcome.seconds[spent.value] / replayed.duration_s:.2f} %" for spent in Spent]
    name = tag("td", tag("i", style=f"background:{colour(number)}"), outcome.policy)
    return tag("tr", name, [tag("td", figure, class_="number") for figure in figures])


def _assumed(costs: Mapping[str, Seconds]) -> Markup:
    lines = [
        f"{name.replace('_s_per_GB', ' of a GB').removesuffix('_s')}: {significant(value)} s"
        for name, value in costs.items()
    ]
    note = "The oracle knows the future and changes for free. Bytes that move have the time of the links."
    return joined(
        tag("ul", [tag("li", line) for line in lines], class_="notes"), tag("p", note, class_="dim")
    )
