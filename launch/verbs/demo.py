"""``arachne demo``: a real language model on four unequal devices of this machine, trained three ways."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from ..demo import Demonstration


def command(
    out: Annotated[Path | None, typer.Option(help="Keep profile, plans, logs and traces here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train a small GPT on four unequal devices, three ways.

    Evenly split DDP, a uniform pipeline, and the plan, on parts of this machine's cores.
    """
    from rich.console import Console

    from ..demo import demonstrate, figures

    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="arachne-demo-") as scratch, progress_bar(console) as on_progress:
        found = demonstrate(out or Path(scratch), on_progress=on_progress)
    if as_json:
        print(figures(found).decode())
    else:
        show(found, console)


def show(found: "Demonstration", console: "Console") -> None:
    """The plan, the three trainings side by side, and the losses step by step."""
    from arachne_runtime.plan.text import describe

    assert found.planned.plan is not None
    console.print("\nThe plan:\n", describe(found.planned.plan), sep="", soft_wrap=True, highlight=False)
    console.print(_steps_table(found), _losses_table(found), sep="\n")
    console.print(
        f"The plan is [bold]{found.speedup:.2f}x[/bold] as fast as even DDP and reaches "
        f"[bold]{found.share_of_ideal:.0%}[/bold] of the ideal; the prediction of its step was off by "
        f"{found.prediction_error:+.1%}; the losses differ by {found.loss_gap:.1e} at most."
    )


@contextmanager
def progress_bar(console: "Console") -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, a line for each new piece of work elsewhere."""
    from ..progress import bar

    shown = bar(console)
    tasks: dict[str, TaskID] = {}

    def on_progress(what: str, part: float) -> None:
        if what not in tasks:
            for task in tasks.values():
                shown.update(task, completed=1.0)
                shown.stop_task(task)
            tasks[what] = shown.add_task(what, total=1.0)
            if not console.is_terminal:
                console.print(what)
        shown.update(tasks[what], completed=part)

    with shown:
        yield on_progress
        for task in tasks.values():
            shown.update(task, completed=1.0)


def _steps_table(found: "Demonstration") -> "Table":
    from rich.table import Table

    table = Table(title="One step of the same global batch (median)")
    for heading in ("", "step", "samples/s", "of the ideal", "predicted"):
        table.add_column(heading, justify="right" if heading else "left")
    for training in found.trainings:
        predicted = training.plan.predicted if training.plan else None
        table.add_row(
            training.name,
            f"{training.step_s:.3f} s",
            f"{training.samples_per_s:.1f}",
            f"{found.ideal_s / training.step_s:.0%}",
            f"{predicted.iteration_s:.3f} s" if predicted else "",
        )
    return table


def _losses_table(found: "Demonstration") -> "Table":
    from rich.table import Table

    table = Table(title="Loss (nats a byte)")
    table.add_column("step", justify="right")
    for training in found.trainings:
        table.add_column(training.name, justify="right")
    rows = list(zip(*(training.steps for training in found.trainings), strict=True))
    for row in rows[:: max(1, len(rows) // 6)]:
        table.add_row(str(row[0].step), *(f"{logged.loss:.6f}" for logged in row))
    return table
