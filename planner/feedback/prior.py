"""How far a figure of a profile may be off before anything has run, and what its error shares with others.

The log of a factor is a sum of effects, each normal around 0: of the device type, of the block kind, of the
direction, and what is left. A run of mixed stages measures sums of figures only; the effects say how what it
measured is to be spread over them, and a figure that no run touches stays where it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.profile import Source

from .observe import Figure, Part

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Standard deviations of the logs of the effects."""

    device: float
    """All of a device type: another load, clocks, another quota."""
    kind: float
    """A block kind on all device types: padding, kernels that a run fuses."""
    direction: float
    """Forward against backward on a device type, and for a kind."""
    device_kind: float
    tp: float
    """A TP degree against the others of its device type."""
    own: float
    """One figure alone."""


MEASURED = Trust(device=1.5, kind=0.15, direction=0.1, device_kind=0.1, tp=0.1, own=0.03)
"""A type may have run under any conditions (a factor of 4.5 either way: another quota, another machine; the
optimizer's estimate from memory bandwidth was 6 to 10 times too slow in the demonstration's lab, 2026-11-30);
within a type a measured profile's proportions hold: two profiles of one lab differ by 3.5 % in the mean and 6
to 14 % in the worst figure (docs/measuring.md)."""
ANALYTIC = Trust(device=1.5, kind=0.3, direction=0.2, device_kind=0.2, tp=0.2, own=0.1)
"""An estimate from FLOPs and bytes misses whole kinds: 16 to 29 % on small layers (docs/cost-model.md), and
embeddings by more."""


def design(figures: Sequence[Figure], sources: Sequence[Source]) -> Floats:
    """Z [figures, effects]: the logs of the factors are Z z with z standard normal."""
    rows = [
        dict(_effects(figure, ANALYTIC if source is Source.ANALYTIC else MEASURED))
        for figure, source in zip(figures, sources, strict=True)
    ]
    columns = {name: i for i, name in enumerate(dict.fromkeys(name for row in rows for name in row))}
    found = np.zeros((len(rows), len(columns)))
    for j, row in enumerate(rows):
        for name, deviation in row.items():
            found[j, columns[name]] = deviation
    return found


def _effects(figure: Figure, trust: Trust) -> Iterator[tuple[tuple[object, ...], float]]:
    """Updates share nothing with blocks: they are bound by memory, or by launches."""
    kind, device, tp, part = figure.kind, figure.device, figure.tp, figure.part
    family = "update" if part is Part.UPDATE else "block"
    yield (family, "device", device), trust.device
    yield (family, "kind", kind), trust.kind
    yield (family, "device kind", device, kind), trust.device_kind
    yield (family, "tp", device, tp), trust.tp
    if part is not Part.UPDATE:
        yield ("device", device, part), trust.direction
        yield ("kind", kind, part), trust.direction / 2
    yield ("own", figure), trust.own
