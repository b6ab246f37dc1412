"""The top of the page: what the plan reaches, and the ideal with what takes the rest."""

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import format_seconds, significant
from planner.explain import Losses, LossKind
from planner.request import Request

from ..answers import PriceAnswer
from ..markup import Markup, joined, tag
from ..tell_price import SHOWN

COLOURS = {
    LossKind.IDLE: "#8a8f98",
    LossKind.GRANULARITY: "#c2703d",
    LossKind.BUBBLES: "#d9a441",
    LossKind.SMALL_SHARES: "#b5895f",
    LossKind.PLACEMENT: "#7d6b99",
    LossKind.RECOMPUTE: "#9c5f8a",
    LossKind.TENSOR: "#5f7fb0",
    LossKind.HOPS: "#3f8f8a",
    LossKind.SYNC: "#5a9e5f",
    LossKind.UPDATE: "#a05252",
}


def header(plan: Plan, price: PriceAnswer, request: Request) -> Markup:
    """Model, devices, and the figures that a reader looks for first."""
    types: dict[str, int] = {}
    for device in plan.devices:
        kind = request.cluster.device_type(device)
        types[kind] = types.get(kind, 0) + 1
    idle = len(request.cluster.devices) - len(plan.devices)
    tiles = [
        (format_seconds(price.iteration_s), "an iteration"),
        (significant(price.samples_per_s, 4), "samples/s"),
        (f"{100 * price.share_of_ideal:.1f} %", "of the ideal"),
        (str(len(plan.devices)), f"devices, {idle} idle" if idle else "devices, none idle"),
        (str(len(plan.pipelines)), f"pipeline{'s' if len(plan.pipelines) > 1 else ''}, {plan.schedule}"),
    ]
    return tag(
        "header",
        tag("h1", plan.model),
        tag("p", " + ".join(f"{count} {kind}" for kind, count in types.items())),
        tag("p", f"global batch {plan.global_batch}, {plan.sequence} tokens a sample", class_="dim"),
        tag("div", [tag("div", tag("b", n), tag("span", what)) for n, what in tiles], class_="tiles"),
    )


def losses_bar(losses: Losses) -> Markup:
    """A bar of the whole iteration and its legend; what is below zero stands in the legend alone."""
    rows = [("ideal", losses.ideal_s, "var(--ideal)")]
    rows += [(loss.kind.value, loss.seconds, COLOURS[loss.kind]) for loss in losses.parts]
    rows = [row for row in rows if abs(row[1]) >= SHOWN * losses.iteration_s]
    whole = sum(max(0.0, seconds) for _, seconds, _ in rows)
    bar = [
        tag("div", style=f"width:{100 * s / whole:.3f}%;background:{colour}", title=_part(name, s, losses))
        for name, s, colour in rows
        if s > 0
    ]
    legend = [
        tag(
            "li",
            tag("i", style=f"background:{colour}"),
            name,
            tag("b", f"{100 * s / losses.iteration_s:.1f} %"),
            title=_part(name, s, losses),
        )
        for name, s, colour in rows
    ]
    return joined(tag("div", bar, class_="losses"), tag("ul", legend, class_="legend"))


def _part(name: str, seconds: float, losses: Losses) -> str:
    return f"{name}: {format_seconds(seconds)}, {100 * seconds / losses.iteration_s:.1f} %"
