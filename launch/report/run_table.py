"""A run report for a person: a table of its pieces, the step, and the sentence that says why."""

from rich.console import Group
from rich.table import Table

from arachne_runtime.units import format_seconds

from .runs import Piece, RunReport

SHOWN_FAULTS = 5
"""Unreadable lines that are named; the others are only counted (``--json`` has all)."""


def told(report: RunReport) -> Group:
    """All that a terminal shows of a report."""
    return Group(_table(report), *_lines(report))


def _table(report: RunReport) -> Table:
    shown = Table(
        title=f"median of {report.steps} steps after {report.warm_up_steps} to warm up", title_justify="left"
    )
    for column in ("stage", "device", "work"):
        shown.add_column(column)
    for column in ("count", "compute", "sending", "predicted", "waiting"):
        shown.add_column(column, justify="right")
    for piece in sorted(report.pieces, key=lambda p: (p.pipeline, p.stage, p.rank)):
        shown.add_row(*_row(piece))
    return shown


def _row(piece: Piece) -> tuple[str, ...]:
    return (
        f"{piece.pipeline}.{piece.stage}",
        piece.device,
        piece.sort,
        str(piece.count),
        format_seconds(piece.compute_s),
        format_seconds(piece.transfer_s),
        "-" if piece.predicted_s is None else format_seconds(piece.predicted_s),
        format_seconds(piece.wait_s),
    )


def _lines(report: RunReport) -> list[str]:
    lines = [f"step: measured {format_seconds(report.measured_s)}"]
    if report.predicted_s is not None and report.error is not None:
        lines[0] += f", predicted {format_seconds(report.predicted_s)}: error {report.error:+.1%}"
    lines.append(f"because: {report.because}")
    if report.faults:
        lines.append(f"left out: {len(report.faults)} lines that are no records")
        lines += [f"  {fault}" for fault in report.faults[:SHOWN_FAULTS]]
    if report.other_plans:
        lines.append(f"left out: records of {len(report.other_plans)} other plans in the same folder")
    if report.earlier_runs:
        lines.append(f"left out: {report.earlier_runs} earlier runs of this plan in the same folder")
    return lines
