"""A correction for a person: prices before and after, factors with their intervals, what was left out."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.table import Table

from arachne_runtime.plan.document import Document
from arachne_runtime.units import format_seconds
from planner.feedback import Correction, Factor, LinkFactor, Part, Priced, PriceError, StepFactor


class CorrectionAnswer(Document, frozen=True, kw_only=True):
    """All of it as JSON."""

    profile: str
    """Path of the corrected profile."""
    runs: tuple[PriceError, ...]
    factors: tuple[Factor, ...]
    links: tuple[LinkFactor, ...]
    steps: tuple[StepFactor, ...]
    notes: tuple[str, ...]


def correction_answer(path: str, found: Correction, notes: Sequence[str]) -> CorrectionAnswer:
    """What ``--json`` prints."""
    return CorrectionAnswer(
        profile=path,
        runs=found.report,
        factors=found.factors,
        links=found.links,
        steps=found.steps,
        notes=tuple(notes),
    )


def tell(answer: CorrectionAnswer) -> None:
    """Print it for a person."""
    Console(highlight=False, soft_wrap=True).print(told(answer))


def told(answer: CorrectionAnswer) -> Group:
    """All that a terminal shows of it."""
    return Group(_runs(answer.runs), _factors(answer.factors), *_lines(answer))


def _runs(runs: Sequence[PriceError]) -> Table:
    shown = Table(title="price of each run's plan (error of the median step)", title_justify="left")
    for column in ("run", "steps", "measured", "before", "after", "by the others"):
        shown.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        prices = (_priced(price) for price in (run.before, run.after, run.held_out))
        shown.add_row(run.run, str(run.steps), format_seconds(run.measured_s), *prices)
    return shown


def _priced(price: Priced | None) -> str:
    return "-" if price is None else f"{format_seconds(price.predicted_s)} ({price.error:+.1%})"


def _factors(factors: Sequence[Factor]) -> Table:
    shown = Table(title="times the profile's seconds, with 95 % intervals", title_justify="left")
    for column in ("device", "block kind", *Part):
        shown.add_column(column)
    found = {(f.device, f.kind, f.tp, f.part): f for f in factors}
    for device, kind, tp in dict.fromkeys((f.device, f.kind, f.tp) for f in factors):
        cells = (_factor(found.get((device, kind, tp, part))) for part in Part)
        shown.add_row(device if tp == 1 else f"{device} TP {tp}", kind, *cells)
    return shown


def _factor(factor: Factor | None) -> str:
    return "-" if factor is None else f"{factor.factor:.2f} [{factor.low:.2f}, {factor.high:.2f}]"


def _lines(answer: CorrectionAnswer) -> Iterator[str]:
    for step in answer.steps:
        before, after = format_seconds(step.before_s), format_seconds(step.after_s)
        yield f"a step beside its blocks on {step.device}: {after} (before: {before})"
    yield from map(str, answer.links)
    yield from (f"{run.run}: no price: {run.because}" for run in answer.runs if run.because)
    yield from answer.notes
