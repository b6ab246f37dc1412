"""A price as text: the headline, the ideal and what takes the rest, what binds, where figures come from."""

from collections.abc import Iterator, Sequence

from arachne_runtime.plan.alike import alike, short
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds, format_bytes, format_seconds, significant
from planner.explain import Losses

from .answers import MisfitAnswer, PriceAnswer

SHOWN = 0.0005
"""Part of the iteration below which a loss is not worth a line: it would be told as 0.0 %."""

BAR_WIDTH = 30
"""Characters of the whole iteration; with what is beside it, a line of 80."""


def price_lines(price: PriceAnswer) -> Iterator[str]:
    """The price for a person, a fact a line."""
    yield (
        f"price: {format_seconds(price.iteration_s)} an iteration, "
        f"{significant(price.samples_per_s, 4)} samples/s, {100 * price.share_of_ideal:.1f} % of the ideal"
    )
    yield from (f"  {line}" for line in loss_lines(price.losses))
    yield from (f"  {line}" for line in cost_lines(price))
    yield f"  limited by: {price.limits}"
    yield from (f"  binds: {binding}" for binding in price.binds)
    figures = ", ".join(f"{figures.device} {figures.source}" for figures in price.figures)
    yield f"  figures: {figures}; in {price.dtype}"
    yield from (f"  not measured: {what}" for what in price.not_measured)


def cost_lines(price: PriceAnswer) -> Iterator[str]:
    """``costs: 42 USD an hour (traffic: 2), 31 USD a million samples; list price of A100-40``."""
    if price.price_per_hour is None or price.cost_per_sample is None:
        return
    traffic = f" (traffic: {significant(price.traffic_per_hour)})" if price.traffic_per_hour else ""
    listed = f"; list price of {', '.join(price.list_priced)}" if price.list_priced else ""
    hourly, a_million = significant(price.price_per_hour), significant(1e6 * price.cost_per_sample)
    of = price.currency
    yield f"costs: {hourly} {of} an hour{traffic}, {a_million} {of} a million samples{listed}"


def misfit_lines(misfit: MisfitAnswer) -> Iterator[str]:
    """Why a plan does not fit, and with what it would."""
    yield f"does not fit: {misfit.reason}"
    yield from (f"  would fit with {repair}" for repair in misfit.would_fit)


def loss_lines(losses: Losses) -> Iterator[str]:
    """The ideal and each loss that shows, largest first, with seconds, part and a bar."""
    rows = [("ideal", losses.ideal_s)]
    rows += sorted(((loss.kind.value, loss.seconds) for loss in losses.parts), key=lambda row: -row[1])
    shown = [(name, s) for name, s in rows if abs(s) >= SHOWN * losses.iteration_s]
    width = max(len(name) for name, _ in shown)
    for name, seconds in shown:
        part = seconds / losses.iteration_s
        bar = "█" * round(BAR_WIDTH * max(part, 0.0))
        yield f"{name:<{width}}  {format_seconds(seconds):>9}  {100 * part:>5.1f} %  {bar}".rstrip()


def why_slower(best: Losses, other: Losses) -> str:
    """What another plan loses more than the best one: ``bubbles +31 ms, hops +4 ms``."""
    gap = other.iteration_s - best.iteration_s
    if gap <= 0:
        return "no slower"
    more = [(b.seconds - a.seconds, a.kind) for a, b in zip(best.parts, other.parts, strict=True)]
    more.sort(key=lambda row: -row[0])
    named = [f"{kind} +{format_seconds(s)}" for s, kind in more[:2] if s > 0.05 * gap]
    return ", ".join(named)


def breakdown_lines(price: PriceAnswer, groups: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Memory and seconds of one device of each group, as ``replicas_of`` names them."""
    heads = ("device", "memory", "compute", "bubble", "hop", "sync", "update")
    rows: list[tuple[str, ...]] = [heads]
    for name, device in groups:
        parts = price.breakdown[device]
        seconds: tuple[Seconds, ...] = (
            parts.compute_s,
            parts.bubble_s,
            parts.hop_s,
            parts.sync_s,
            parts.update_s,
        )
        memory = format_bytes(price.peak_bytes[device])
        rows.append((name, memory, *(format_seconds(value) for value in seconds)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def replicas_of(plan: Plan, cluster: Cluster | None) -> Sequence[tuple[str, str]]:
    """A line for each kind of replica of each group of alike pipelines: its devices, and one of them."""
    found: dict[tuple[tuple[int, ...], int, str, int, int], list[str]] = {}
    for group in alike(plan, cluster):
        for s, stage in enumerate(group.first.stages):
            for replica in stage.replicas:
                kind = cluster.device_type(replica.devices[0]) if cluster else ""
                key = group.pipelines, s, kind, len(replica.devices), replica.share
                found.setdefault(key, []).extend(replica.devices)
    return [(_named(devices, len(pipelines)), devices[0]) for (pipelines, *_), devices in found.items()]


def _named(devices: Sequence[str], pipelines: int) -> str:
    """``a-0:0-1``; ``v-0:0-3 ...`` where there are more nodes, ``a-0:0 × 4`` for alike pipelines."""
    first, *more = short(devices).split()
    return first + (" ..." if more else "") + (f" × {pipelines}" if pipelines > 1 else "")
