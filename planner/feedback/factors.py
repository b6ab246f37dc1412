"""Factors of a profile's figures with their intervals, from the rows of all runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.profile import Source

from .observe import Figure, Observation, Part, ran_figures
from .prior import Floats, design
from .regression import Fit, Sums, fit

DRIFT = 0.02
"""Deviation of the log of what a run measures against the next run: the demonstration's plan in four runs on
a busy lab (docs/measuring.md). More rows of one run do not make it smaller."""
NORMAL_95 = 1.96
OUTLIER = 0.3
"""A row with less weight than this is named as an outlier: it is 3 deviations off."""


class Factor(Document, frozen=True, kw_only=True):
    """What the seconds of a figure are multiplied by."""

    kind: str
    device: str
    """Device type."""
    tp: int
    part: Part
    factor: float
    low: float
    """With ``high`` an interval that holds the true factor with 95 % probability."""
    high: float
    rows: int
    """Rows of the runs (rank, part, share) that the figure is in; 0: known by what it shares with others."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the log."""
        return math.log(self.high / self.low) / (2 * NORMAL_95)

    def __str__(self) -> str:
        figure = Figure(self.kind, self.device, self.tp, self.part)
        return f"{figure}: {self.factor:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Factors:
    """All factors, and the rows that disagree with them."""

    by_figure: Mapping[Figure, Factor]
    outliers: tuple[str, ...]


def factors_of(rows: Sequence[Observation], sources: Mapping[Figure, Source]) -> Factors:
    """Factors of every figure in ``sources`` whose device type is in a row, and of all in the rows."""
    if not rows:
        return Factors({}, ())
    ran = {(row.device, row.part is Part.UPDATE) for row in rows}
    known = [f for f in sources if (f.device, f.part is Part.UPDATE) in ran]
    figures = sorted({*known, *ran_figures(rows)})
    found = fit(_sums(rows, figures), design(figures, [sources.get(f, Source.ANALYTIC) for f in figures]))
    doubt = _doubt(rows, figures, found)
    deviation = np.sqrt(found.deviation**2 + doubt**2 + DRIFT**2)
    count = {f: sum(f in row.terms for row in rows) for f in figures}
    return Factors(
        {
            figure: Factor(
                kind=figure.kind,
                device=figure.device,
                tp=figure.tp,
                part=figure.part,
                factor=math.exp(log),
                low=math.exp(log - NORMAL_95 * sd),
                high=math.exp(log + NORMAL_95 * sd),
                rows=count[figure],
            )
            for figure, log, sd in zip(figures, found.logs, deviation, strict=True)
        },
        tuple(_outliers(rows, found)),
    )


def _sums(rows: Sequence[Observation], figures: Sequence[Figure]) -> Sums:
    column = {figure: j for j, figure in enumerate(figures)}
    seconds = np.zeros((len(rows), len(figures)))
    for i, row in enumerate(rows):
        for figure, value in row.terms.items():
            seconds[i, column[figure]] = value
    return Sums(
        seconds,
        np.array([row.fixed_s for row in rows]),
        np.array([row.measured_s for row in rows]),
        np.array([row.deviation for row in rows]),
    )


def _doubt(rows: Sequence[Observation], figures: Sequence[Figure], found: Fit) -> Floats:
    """Deviation on account of outliers [figures]: any of them may be the one that is right.

    If all n rows of a part on a device type counted alike, an outlier of r would move their mean by r / n; of
    two that disagree neither can be believed, one of eight hardly matters.
    """
    squares: dict[tuple[str, int, Part], float] = {}
    count: dict[tuple[str, int, Part], int] = {}
    for row, residual, weight in zip(rows, found.residual, found.weight, strict=True):
        key = row.device, row.tp, row.part
        squares[key] = squares.get(key, 0.0) + (1 - weight) * residual**2
        count[key] = count.get(key, 0) + 1
    keys = [(f.device, f.tp, f.part) for f in figures]
    return np.array([math.sqrt(squares[key]) / count[key] if key in count else 0.0 for key in keys])


def _outliers(rows: Sequence[Observation], found: Fit) -> Iterator[str]:
    for row, residual, weight in zip(rows, found.residual, found.weight, strict=True):
        if weight < OUTLIER:
            yield (
                f"{row.run}: {row.part} on rank {row.rank} ({row.device}) took {math.exp(residual):.2f} "
                f"times what all the others say; it counts {weight:.0%}"
            )
