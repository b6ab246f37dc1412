"""Rules of a profile: times above zero, ascending link points, nothing measured twice."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

from ...errors import Problem
from ..profile import Profile
from .bounds import above_zero, at_least, not_negative

T = TypeVar("T")


def check_profile(profile: Profile) -> tuple[Problem, ...]:
    """Every violation of every rule."""
    return tuple(problem for rule in PROFILE_RULES for problem in rule(profile))


def model_is_named(profile: Profile) -> Iterator[Problem]:
    """Block kinds belong to a model."""
    if not profile.model.strip():
        yield Problem("$.model", "is empty; give the model's name")


def has_timings(profile: Profile) -> Iterator[Problem]:
    """A profile holds a measurement."""
    if not profile.timings:
        yield Problem("$.timings", "has no timing; run `arachne profile`")


def kinds_and_devices_are_named(profile: Profile) -> Iterator[Problem]:
    """Measurements are looked up by block kind and device type."""
    for path, row in (*_rows("timings", profile.timings), *_rows("updates", profile.updates)):
        for field in ("kind", "device"):
            if not getattr(row, field).strip():
                yield Problem(f"{path}.{field}", "is empty")
    for path, step in _rows("steps", profile.steps):
        if not step.device.strip():
            yield Problem(f"{path}.device", "is empty")
    for path, link in _rows("links", profile.links):
        for i, device in enumerate(link.between):
            if not device.strip():
                yield Problem(f"{path}.between[{i}]", "is empty")


def counts_are_positive(profile: Profile) -> Iterator[Problem]:
    """Tokens, samples, degrees and senders are counted from 1."""
    counts = {"$.sequence": profile.sequence}
    for path, timing in _rows("timings", profile.timings):
        counts |= {f"{path}.tp": timing.tp, f"{path}.samples": timing.samples}
    counts |= {f"{path}.tp": update.tp for path, update in _rows("updates", profile.updates)}
    counts |= {f"{path}.senders": link.senders for path, link in _rows("links", profile.links)}
    yield from at_least(1, counts)


def times_are_positive(profile: Profile) -> Iterator[Problem]:
    """Work takes time: a zero means that nothing was measured."""
    seconds: dict[str, float] = {}
    for path, timing in _rows("timings", profile.timings):
        seconds |= {f"{path}.forward_s": timing.forward_s, f"{path}.backward_s": timing.backward_s}
    for path, link in _rows("links", profile.links):
        seconds |= {f"{path}.points[{i}].seconds": point.seconds for i, point in enumerate(link.points)}
    yield from above_zero(seconds, "; leave out what was not measured")


def fixed_costs_are_not_negative(profile: Profile) -> Iterator[Problem]:
    """A step's own cost, an update of a block without parameters, and kept bytes may be 0."""
    values: dict[str, float | None] = {"$.step_s": profile.step_s}
    values |= {f"{path}.update_s": update.update_s for path, update in _rows("updates", profile.updates)}
    values |= {f"{path}.step_s": step.step_s for path, step in _rows("steps", profile.steps)}
    for path, timing in _rows("timings", profile.timings):
        values[f"{path}.activation_bytes"] = timing.activation_bytes
        if timing.working is not None:
            for name in timing.working.__struct_fields__:
                values[f"{path}.working.{name}"] = getattr(timing.working, name)
    for path, update in _rows("updates", profile.updates):
        values[f"{path}.temporary_bytes"] = update.temporary_bytes
    for path, link in _rows("links", profile.links):
        values |= {f"{path}.points[{i}].bytes": point.bytes for i, point in enumerate(link.points)}
    yield from not_negative(values)


def links_have_ascending_points(profile: Profile) -> Iterator[Problem]:
    """A link is read off between two message sizes."""
    for path, link in _rows("links", profile.links):
        if not link.points:
            yield Problem(f"{path}.points", "has no point")
        for i, (before, after) in enumerate(pairwise(link.points), start=1):
            if after.bytes <= before.bytes:
                message = f"is {after.bytes}, but the point before has {before.bytes}; points ascend"
                yield Problem(f"{path}.points[{i}].bytes", message)


def nothing_is_measured_twice(profile: Profile) -> Iterator[Problem]:
    """Two figures for one thing contradict each other; merge them before writing."""
    yield from _repeated("timings", [(t.kind, t.device, t.tp, t.samples) for t in profile.timings])
    yield from _repeated("updates", [(u.kind, u.device, u.tp) for u in profile.updates])
    yield from _repeated("steps", [step.device for step in profile.steps])
    yield from _repeated("links", [(*sorted(x.between), x.scope, x.senders) for x in profile.links])


PROFILE_RULES: tuple[Callable[[Profile], Iterator[Problem]], ...] = (
    model_is_named,
    has_timings,
    kinds_and_devices_are_named,
    counts_are_positive,
    times_are_positive,
    fixed_costs_are_not_negative,
    links_have_ascending_points,
    nothing_is_measured_twice,
)


def _repeated(name: str, keys: Iterable[Hashable]) -> Iterator[Problem]:
    first: dict[Hashable, int] = {}
    for i, key in enumerate(keys):
        if first.setdefault(key, i) != i:
            yield Problem(f"$.{name}[{i}]", f"measures the same as $.{name}[{first[key]}]; keep one")


def _rows(name: str, rows: tuple[T, ...]) -> Iterator[tuple[str, T]]:
    for i, row in enumerate(rows):
        yield f"$.{name}[{i}]", row
