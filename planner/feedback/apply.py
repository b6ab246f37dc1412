"""A profile with its figures corrected, each marked by how sure it is.

A corrected figure is *measured* where a run had that very share and its factor is known within 5 %. Else it
is *interpolated*: a measurement times what was measured beside it. What was *analytic* stays so, unless its
factor is known within 20 %, the distance from the shares that ran counted in.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.profile import BlockTiming, Profile, Source, UpdateTiming

from .factors import Factor
from .observe import Figure, Part

SURE = 0.05
"""Deviation of the log of a figure that counts as measured: that of a lab's own speed (docs/measuring.md)."""
FAIR = 0.2
"""Deviation of the log of a figure that is still told from its neighbours: what an analytic estimate of a
layer misses (docs/cost-model.md)."""
PER_OCTAVE = 0.05
"""Deviation of the log of a factor for each doubling of the share beyond those that ran."""


def corrected(
    profile: Profile,
    factors: Mapping[Figure, Factor],
    shares: Mapping[tuple[str, int], tuple[int, ...]],
    update_s: Mapping[Figure, float],
) -> Profile:
    """``profile`` times ``factors``; ``shares`` that ran by (device type, TP) get rows of their own.

    ``update_s``: an optimizer step as the price had it, for figures that the profile does not hold.
    """
    timings = (*profile.timings, *_rows_that_ran(profile, factors, shares))
    return replace(
        profile,
        timings=tuple(_timing(row, factors, shares.get((row.device, row.tp), ())) for row in timings),
        updates=tuple(_updates(profile, factors, update_s)),
    )


def _rows_that_ran(
    profile: Profile,
    factors: Mapping[Figure, Factor],
    shares: Mapping[tuple[str, int], tuple[int, ...]],
) -> Iterator[BlockTiming]:
    """A row for each share that ran between two rows, so that the profile is exact there."""
    have = {(t.kind, t.device, t.tp, t.samples) for t in profile.timings}
    kinds = dict.fromkeys((f.kind, f.device, f.tp) for f in factors if f.part is not Part.UPDATE)
    for kind, device, tp in kinds:
        for samples in shares.get((device, tp), ()):
            if (kind, device, tp, samples) in have:
                continue
            try:
                cost = profile.block(kind, device, tp, samples)
            except NotMeasuredError:
                continue
            yield BlockTiming(
                kind=kind,
                device=device,
                tp=tp,
                samples=samples,
                forward_s=cost.forward_s,
                backward_s=cost.backward_s,
                activation_bytes=cost.activation_bytes,
                working=cost.working,
                source=cost.source,
            )


def _timing(row: BlockTiming, factors: Mapping[Figure, Factor], ran: Sequence[int]) -> BlockTiming:
    both = [factors.get(Figure(row.kind, row.device, row.tp, part)) for part in (Part.FORWARD, Part.BACKWARD)]
    if both[0] is None or both[1] is None:
        return row
    worst = max(factor.deviation for factor in both if factor)
    deviation = math.hypot(worst, PER_OCTAVE * _octaves(row.samples, ran))
    here = row.samples in ran and all(factor.rows for factor in both if factor)
    return replace(
        row,
        forward_s=row.forward_s * both[0].factor,
        backward_s=row.backward_s * both[1].factor,
        source=_source(row.source, deviation, here=here),
    )


def _octaves(samples: int, ran: Sequence[int]) -> float:
    """How far a share is beyond those that ran, in doublings; 0 between them, or where none ran."""
    if not ran:
        return 0.0
    return max(0.0, math.log2(ran[0] / samples), math.log2(samples / ran[-1]))


def _updates(
    profile: Profile, factors: Mapping[Figure, Factor], update_s: Mapping[Figure, float]
) -> Iterator[UpdateTiming]:
    have = set()
    for row in profile.updates:
        figure = Figure(row.kind, row.device, row.tp, Part.UPDATE)
        have.add(figure)
        factor = factors.get(figure)
        yield row if factor is None else _update(figure, factor, row.update_s, row.source)
    for figure, seconds in update_s.items():
        if figure not in have and figure in factors:
            yield _update(figure, factors[figure], seconds, Source.ANALYTIC)


def _update(figure: Figure, factor: Factor, seconds: float, source: Source) -> UpdateTiming:
    return UpdateTiming(
        kind=figure.kind,
        device=figure.device,
        tp=figure.tp,
        update_s=seconds * factor.factor,
        source=_source(source, factor.deviation, here=factor.rows > 0),
    )


def _source(before: Source, deviation: float, *, here: bool) -> Source:
    if here and deviation <= SURE:
        return Source.MEASURED
    return Source.ANALYTIC if before is Source.ANALYTIC and deviation > FAIR else Source.INTERPOLATED


def sources_of(profile: Profile) -> dict[Figure, Source]:
    """Every figure of a profile, with the worst of the sources of its rows."""
    worst = (Source.ANALYTIC, Source.INTERPOLATED, Source.MEASURED)
    found: dict[Figure, Source] = {}

    def add(figure: Figure, source: Source) -> None:
        found[figure] = min(found.get(figure, Source.MEASURED), source, key=worst.index)

    for timing in profile.timings:
        for part in (Part.FORWARD, Part.BACKWARD):
            add(Figure(timing.kind, timing.device, timing.tp, part), timing.source)
    for update in profile.updates:
        add(Figure(update.kind, update.device, update.tp, Part.UPDATE), update.source)
    return found
