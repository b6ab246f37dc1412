"""The same curves as a PNG, where matplotlib is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arachne_runtime.errors import UnsupportedEnvironmentError
from arachne_runtime.units import HOUR_S
from launch.simulation.outcome import Replayed

from .chart import colour
from .text import hours


def draw_replay(replayed: Replayed, path: Path) -> None:
    """Samples by policy above, changes and devices below; UnsupportedEnvironmentError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UnsupportedEnvironmentError(
            f"{path}: a PNG needs matplotlib; pip install 'arachne-hetero[plots]', or write an .html page"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    samples, changes, devices = figure.subplots(3, 1, sharex=True, height_ratios=(5, 1, 1.4))
    _samples(samples, replayed)
    _changes(changes, replayed)
    times = [at_s / HOUR_S for at_s, _ in replayed.devices] + [replayed.duration_s / HOUR_S]
    counts = [count for _, count in replayed.devices]
    devices.fill_between(times, [*counts, counts[-1]], step="post", color="#8d939d", alpha=0.5)
    devices.set(xlabel="hours", ylabel="devices", ylim=(0, None), xlim=(0, times[-1]))
    figure.savefig(path, dpi=130, format="png")


def _samples(axes: Any, replayed: Replayed) -> None:
    for number, outcome in enumerate(replayed.outcomes):
        axes.plot(
            [at_s / HOUR_S for at_s, _ in outcome.curve],
            [samples for _, samples in outcome.curve],
            label=f"{outcome.policy}: {100 * outcome.of_oracle:.1f} %",
            color=colour(number),
            linestyle="--" if number == 0 else "-",
            linewidth=1.3,
        )
    axes.set(ylabel="samples trained", ylim=(0, None))
    axes.set_title(f"{replayed.model}, {replayed.trace}, {hours(replayed.duration_s)}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


def _changes(axes: Any, replayed: Replayed) -> None:
    policies = replayed.outcomes[1:]
    axes.eventplot(
        [[change.at_s / HOUR_S for change in outcome.changes] for outcome in policies],
        colors=[colour(number) for number in range(1, 1 + len(policies))],
        lineoffsets=list(range(len(policies), 0, -1)),
        linelengths=0.8,
        linewidths=1,
    )
    axes.set_yticks([])
    axes.set_ylabel("changes")
