"""Makes one profile of what several ranks measured: devices of a type are averaged, and their spread told."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from msgspec.structs import replace

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import read_profile
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.profile import BlockTiming, Profile, UpdateTiming, WorkingBytes

from .job import RankResult

WIDE = 0.05
"""Devices of one type that differ by more than this part of their mean are worth a word."""

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Merged:
    """The files of a profile, and what a person should know of them."""

    model: ModelSpec
    profile: Profile
    notes: tuple[str, ...]


def merge(results: Sequence[RankResult]) -> Merged:
    """One model and one profile from the results of all ranks (at least one)."""
    timings = [timing for result in results for timing in result.timings]
    updates = [update for result in results for update in result.updates]
    blocks = _grouped(timings, lambda t: (t.kind, t.device, t.samples))
    steps = _grouped(updates, lambda u: (u.kind, u.device))
    fixed = _grouped([result.step for result in results], lambda s: s.device)
    model = _model([result.model for result in results])
    profile = Profile(
        model=model.name,
        sequence=model.sequence,
        dtype=model.dtype,
        timings=tuple(map(_mean_timing, blocks)),
        updates=tuple(replace(rows[0], update_s=fmean(u.update_s for u in rows)) for rows in steps),
        steps=tuple(replace(rows[0], step_s=fmean(s.step_s for s in rows)) for rows in fixed),
        links=results[0].links,
    )
    spreads = [_timing_spread(rows) for rows in blocks] + [_update_spread(rows) for rows in steps]
    return Merged(model, profile, tuple(_notes(spreads)))


def _grouped(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _mean_timing(rows: Sequence[BlockTiming]) -> BlockTiming:
    return replace(
        rows[0],
        forward_s=fmean(t.forward_s for t in rows),
        backward_s=fmean(t.backward_s for t in rows),
        activation_bytes=max((t.activation_bytes or 0 for t in rows), default=0),
        working=_most_working([t.working for t in rows if t.working is not None]),
    )


def _most_working(rows: Sequence[WorkingBytes]) -> WorkingBytes | None:
    if not rows:
        return None
    fields = {name: [getattr(row, name) for row in rows] for name in WorkingBytes.__struct_fields__}
    most: dict[str, Any] = {name: None if None in of else max(of) for name, of in fields.items()}
    return WorkingBytes(**most)


def _model(models: Sequence[ModelSpec]) -> ModelSpec:
    """The ranks measured one model; of what its blocks keep, the most that any device keeps."""
    by_block = zip(*(model.blocks for model in models), strict=True)
    return replace(models[0], blocks=tuple(map(_most_kept, by_block)))


def _most_kept(same: Sequence[BlockSpec]) -> BlockSpec:
    return replace(same[0], activation_bytes=max(block.activation_bytes for block in same))


@dataclass(frozen=True, slots=True)
class _Spread:
    """How much the devices of one type differ in one measurement."""

    device: str
    count: int
    what: str
    part: float


def _timing_spread(rows: Sequence[BlockTiming]) -> _Spread:
    what = f"{rows[0].kind} at {rows[0].samples} samples"
    return _Spread(rows[0].device, len(rows), what, _range([t.forward_s + t.backward_s for t in rows]))


def _update_spread(rows: Sequence[UpdateTiming]) -> _Spread:
    what = f"update of {rows[0].kind}"
    return _Spread(rows[0].device, len(rows), what, _range([u.update_s for u in rows]))


def _range(seconds: Sequence[float]) -> float:
    mean = fmean(seconds)
    return (max(seconds) - min(seconds)) / mean if mean > 0 else 0.0


def _notes(spreads: Sequence[_Spread]) -> Iterator[str]:
    """One sentence for each device type that differs more than a little."""
    for device, several in groupby(sorted(spreads, key=lambda s: s.device), lambda s: s.device):
        found = list(several)
        wide = [s for s in found if s.part > WIDE]
        if wide:
            worst = max(wide, key=lambda s: s.part)
            yield (
                f"the {worst.count} devices of type {device} differ by more than {WIDE:.0%} in {len(wide)} "
                f"of {len(found)} measurements, most in {worst.what} ({worst.part:.0%}); their mean is kept"
            )


def extend(new: Merged, folder: Path) -> Merged:
    """What was measured now, and what an earlier run on another node left in ``folder``.

    Raises UsageError where that is a profile of another model.
    """
    if not (folder / "profile.json").exists():
        return new
    old = read_profile(folder / "profile.json")
    for field in ("model", "sequence", "dtype"):
        here, there = getattr(new.profile, field), getattr(old, field)
        if here != there:
            raise UsageError(
                f"{folder / 'profile.json'} has {field} {there!r}, and now {here!r} was measured; "
                f"use another --out"
            )
    measured = {timing.device for timing in new.profile.timings}
    profile = replace(
        new.profile,
        timings=(*(t for t in old.timings if t.device not in measured), *new.profile.timings),
        updates=(*(u for u in old.updates if u.device not in measured), *new.profile.updates),
        steps=(*(s for s in old.steps if s.device not in measured), *new.profile.steps),
        links=(*(x for x in old.links if not measured.issuperset(x.between)), *new.profile.links),
    )
    return Merged(new.model, profile, new.notes)
