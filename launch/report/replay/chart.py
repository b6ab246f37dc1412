"""Samples over time by policy, available devices below, changes marked: an SVG without a script."""

from collections.abc import Iterator, Sequence
from math import floor, log10

from arachne_runtime.units import HOUR_S, Seconds, significant
from launch.simulation.outcome import Outcome, Replayed

from ..markup import Markup, tag

WIDTH, LEFT, RIGHT = 1240, 74, 12
SAMPLES_TOP, SAMPLES_HEIGHT = 10, 330
MARKS_TOP, MARK_HEIGHT = 356, 9
DEVICES_HEIGHT = 90
GAP, BELOW = 16, 26
MOST_TICKS = 8

COLOURS = ("#8a8f98", "#3b73b9", "#3f8f8a", "#d9a441", "#c2703d", "#9c5f8a")
"""Of the outcomes in order; the first is the oracle."""


def colour(number: int) -> str:
    """Of an outcome."""
    return COLOURS[number % len(COLOURS)]


def chart(replayed: Replayed) -> Markup:
    """All of it, as wide as the page."""
    policies = replayed.outcomes[1:]
    devices_top = MARKS_TOP + len(policies) * MARK_HEIGHT + GAP
    bottom = devices_top + DEVICES_HEIGHT
    return tag(
        "svg",
        _grid(replayed, devices_top, bottom),
        [_curve(o, replayed, number) for number, o in reversed(list(enumerate(replayed.outcomes)))],
        [mark for number, o in enumerate(policies, start=1) for mark in _marks(o, replayed, number)],
        _devices(replayed, devices_top),
        viewBox=f"0 0 {WIDTH} {bottom + BELOW}",
        class_="replay",
        role="img",
        aria_label="Samples trained over time by policy, with the devices that are there",
    )


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to ``most``, some five."""
    raw = most / MOST_TICKS
    power = 10 ** floor(log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw)
    return [step * number for number in range(int(most / step) + 1)]


def _x(at_s: Seconds, replayed: Replayed) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at_s / replayed.duration_s


def _y(samples: float, replayed: Replayed) -> float:
    return SAMPLES_TOP + SAMPLES_HEIGHT * (1 - samples / replayed.outcomes[0].samples)


def _grid(replayed: Replayed, devices_top: float, bottom: float) -> Iterator[Markup]:
    for samples in ticks(replayed.outcomes[0].samples):
        y = _y(samples, replayed)
        yield _line(LEFT, y, WIDTH - RIGHT, y)
        yield _words(LEFT - 8, y + 4, f"{samples:,.0f}", "end")
    unit_s, name = (HOUR_S, "h") if replayed.duration_s >= 2 * HOUR_S else (60.0, "min")
    for at in ticks(replayed.duration_s / unit_s):
        x = _x(at * unit_s, replayed)
        yield _line(x, SAMPLES_TOP, x, bottom)
        yield _words(x, bottom + 17, f"{significant(at)} {name}" if at else "0", "middle")
    yield _words(LEFT - 8, devices_top + 9, str(replayed.most_devices), "end")
    yield _words(LEFT - 8, bottom, "0", "end")
    yield _words(LEFT - 8, MARKS_TOP + MARK_HEIGHT, "changes", "end")
    yield _words(LEFT - 8, devices_top + DEVICES_HEIGHT / 2 + 4, "devices", "end")


def _curve(outcome: Outcome, replayed: Replayed, number: int) -> Markup:
    points = [(_x(at_s, replayed), _y(samples, replayed)) for at_s, samples in outcome.curve]
    return tag(
        "path",
        tag("title", f"{outcome.policy}: {outcome.samples:,.0f} samples"),
        d=_path(points),
        stroke=colour(number),
        class_="curve dashed" if number == 0 else "curve",
    )


def _marks(outcome: Outcome, replayed: Replayed, number: int) -> Iterator[Markup]:
    y = MARKS_TOP + (number - 1) * MARK_HEIGHT
    for change in outcome.changes:
        x = _x(change.at_s, replayed)
        told = (
            f"{outcome.policy}, {significant(change.at_s / HOUR_S, 4)} h: {change.plan}, "
            f"{significant(change.samples_per_s)} samples/s; stood for {significant(change.standstill_s)} s, "
            f"state from {change.source}, {significant(change.redone_steps)} steps again"
        )
        yield tag(
            "path",
            tag("title", told),
            d=f"M{x:.1f} {y}v{MARK_HEIGHT - 2}",
            stroke=colour(number),
            class_="mark",
        )


def _devices(replayed: Replayed, top: float) -> Markup:
    points: list[tuple[float, float]] = []
    most = replayed.most_devices
    for (at_s, count), end_s in zip(
        replayed.devices, [*(at_s for at_s, _ in replayed.devices[1:]), replayed.duration_s], strict=True
    ):
        y = top + DEVICES_HEIGHT * (1 - count / most)
        points += [(_x(at_s, replayed), y), (_x(end_s, replayed), y)]
    bottom = top + DEVICES_HEIGHT
    area = [(LEFT, bottom), *points, (WIDTH - RIGHT, bottom)]
    return tag("path", tag("title", "devices that are there"), d=f"{_path(area)}z", class_="there")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return tag("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", class_="grid")


def _words(x: float, y: float, words: str, anchor: str) -> Markup:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
