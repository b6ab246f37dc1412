"""The curves of the contests as a picture: part of the best plan known by evaluations, and by CPU time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.learned_records import Contest
from bench.learned_tables import Rows, shares, shares_in_time


def draw(contests: Sequence[Contest], marks: Sequence[int], budgets_s: Sequence[float], file: Path) -> None:
    """Medians over problems, with their range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    _lines(left, marks, shares(contests, marks))
    _lines(right, [1e3 * s for s in budgets_s], shares_in_time(contests, budgets_s))
    left.set(xlabel="evaluations", ylabel="part of the best plan known", xscale="log")
    right.set(xlabel="CPU time, ms", xscale="log")
    left.set_title(f"median of {len(contests)} problems, range over seeds", fontsize=9)
    for axes in (left, right):
        axes.legend(fontsize=8, loc="lower right")
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _lines(axes: Any, places: Sequence[float], rows: Rows) -> None:
    for name, cells in rows.items():
        (line,) = axes.plot(places, [cell.figure for cell in cells], marker="o", markersize=3, label=name)
        low, high = ([end(cell.values) for cell in cells] for end in (min, max))
        axes.fill_between(places, low, high, alpha=0.15, color=line.get_color())
