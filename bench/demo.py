"""What `make demo` runs, judged: the plan beside even DDP and a uniform pipeline, on four unequal devices.

The devices are CPU shares of 0.8, 0.4, 0.2 and 0.2 of a core (``launch.demo.LAB``).
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.demo import Demonstration, demonstrate, figures

from .report import Options, Result, at_least, at_most, run_bench

QUICK_SAMPLES = (1, 8, 72)
QUICK_STEPS = 7


def measure(options: Options) -> Iterator[Result]:
    """One demonstration; with ``--quick`` fewer shares are timed and fewer steps trained."""
    said: set[str] = set()

    def say(what: str, _: float) -> None:
        if what not in said:
            said.add(what)
            print(what, flush=True)

    with tempfile.TemporaryDirectory(prefix="arachne-demo-") as scratch:
        folder = Path(scratch)
        if options.quick:
            found = demonstrate(folder, on_progress=say, num_steps=QUICK_STEPS, samples=QUICK_SAMPLES)
        else:
            found = demonstrate(folder, on_progress=say)
    if options.out is not None:
        (options.out / "demo-figures.json").write_bytes(figures(found))
        draw(found, options.out / "demo.png")
    for training in found.trainings:
        print(f"{training.name}: {training.step_s:.3f} s a step, {training.samples_per_s:.1f} samples/s")
    yield at_least("plan-over-even-ddp", found.speedup, "x", bound=1.5)
    yield at_least("share-of-ideal", found.share_of_ideal, "of 1", bound=0.88)
    yield at_most("prediction-error", abs(found.prediction_error), "of 1", bound=0.05)
    yield at_most("loss-gap", found.loss_gap, "nats", bound=1e-4)


def draw(found: Demonstration, path: Path) -> None:
    """Step times as bars, the ideal as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.add_subplot()
    names = [training.name for training in found.trainings]
    bars = axes.barh(names, [t.step_s for t in found.trainings], color=["#9aa5b1", "#9aa5b1", "#2f6fed"])
    axes.bar_label(bars, [f"{t.step_s:.2f} s" for t in found.trainings], padding=4)
    axes.axvline(found.ideal_s, color="#d64545", linestyle="--", label=f"ideal {found.ideal_s:.2f} s")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a step, the same global batch (lower is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(run_bench("demo", measure))
