"""The figures of a training run over its steps: JSON lines, and a picture where matplotlib is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from arachne_runtime.plan.files import write_whole


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured after one step of one stage."""

    stage: str
    step: int
    figures: dict[str, float]
    """By name, the unit in the name."""


@dataclass(slots=True)
class Curves:
    """All points so far, in a file that is right after every point."""

    path: Path
    points: list[Point]

    @classmethod
    def at(cls, path: Path) -> "Curves":
        """With what an earlier run left there."""
        lines = path.read_bytes().splitlines() if path.exists() else []
        return cls(path, [msgspec.json.decode(line, type=Point) for line in lines])

    def add(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        """One point; it takes the place of those that a killed run measured at that step or later."""
        kept = [p for p in self.points if p.stage != stage or p.step < step]
        rounded = {name: float(f"{value:.6g}") for name, value in figures.items()}
        self.points = [*kept, Point(stage=stage, step=step, figures=rounded)]
        write_whole(self.path, "".join(f"{msgspec.json.encode(p).decode()}\n" for p in self.points).encode())

    def of(self, stage: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one figure."""
        found = [(p.step, p.figures[name]) for p in self.points if p.stage == stage and name in p.figures]
        return [step for step, _ in found], [value for _, value in found]


def draw_curves(curves: Curves, path: Path, panels: Sequence[tuple[str, Sequence[str]]]) -> bool:
    """A PNG with one panel for each (stage, figures); False where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (stage, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in names:
            axes.plot(*curves.of(stage, name), label=name.replace("_", " "))
        axes.set(title=stage.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True
