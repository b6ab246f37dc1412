"""``arachne learn``: trains the policy that proposes templates, from nothing or on measured costs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from arachne_runtime.errors import UsageError

from ..folders import make_writable
from ..options import AsJson

if TYPE_CHECKING:  # loads NumPy and torch, which `arachne --help` does without
    from rich.progress import TaskID

    from planner.training.context import Progress
    from planner.training.recipe import Recipe
    from planner.training.run import Trained

    from ..report.tell_correction import CorrectionAnswer

RECIPES = ("standard", "small")


def command(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the run: weights, card, curves; one that was stopped goes on. With --from also a "
            "FILE.json: the corrected profile, and nothing is trained."
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="standard (as the shipped weights; with --from minutes; the default) or small (a minute)."
        ),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option("--from", help="Learn from costs that runs below this folder recorded.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="With --from: the profile.json that their plans had.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Labels to learn from (default: made in the run's folder).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of problems, weights and rollouts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train the policy that proposes templates to the search.

    The search asks the policy when its own proposals bring nothing better and time is left.
    The same recipe and seed give the same weights on one machine. With --from the profile is corrected by
    what runs measured, and the shipped weights are fine-tuned on its costs.
    """
    if (runs is None) != (profile is None):
        raise UsageError("--from and --profile go together: runs correct a profile")
    if runs is not None and labels is not None:
        raise UsageError("--labels are of random problems; --from makes its own")
    if recipe is not None and recipe not in RECIPES:
        raise UsageError(f"no recipe named {recipe!r}; known: {', '.join(RECIPES)}")
    if runs is not None and profile is not None and out.suffix == ".json":
        if recipe is not None:
            raise UsageError(f"--out {out} is a file: nothing is trained, so --recipe means nothing there")
        _correct(runs, profile, out, as_json=as_json)
        return
    chosen = _recipe(recipe or RECIPES[0], seed, tunes=runs is not None)
    make_writable(out, "--out")
    if runs is None or profile is None:
        with _progress_bar() as on_progress:
            from planner.training.run import train

            trained = train(chosen, out, on_progress, labels=labels)
        print(_as_json(trained) if as_json else _as_text(trained))
        return
    _fine_tune(chosen, runs, profile, out, as_json=as_json)


def _correct(runs: Path, profile: Path, file: Path, *, as_json: bool) -> None:
    """The corrected profile alone: takes a moment, and no torch."""
    from arachne_runtime.plan.files import encode

    from ..feeding import learn_costs
    from ..report.tell_correction import tell

    _, correction = learn_costs(runs, profile, file)
    if as_json:
        print(encode(correction).decode(), end="")
    else:
        tell(correction)


def _fine_tune(recipe: "Recipe", runs: Path, profile: Path, out: Path, *, as_json: bool) -> None:
    """The corrected profile, the report, then the weights."""
    from planner.training.fine_tune import fine_tune

    from ..feeding import learn_costs
    from ..report.tell_correction import tell

    fed, correction = learn_costs(runs, profile, out / "profile.json")
    if not as_json:
        tell(correction)
    with _progress_bar() as on_progress:
        trained = fine_tune(recipe, fed.correction, fed.runs, out, on_progress)
    print(_as_json(trained, correction) if as_json else _as_text(trained))


def _recipe(name: str, seed: int, *, tunes: bool) -> "Recipe":
    from planner.training.recipe import Recipe

    if tunes:
        return Recipe.tuning(seed, small=name == "small")
    return Recipe.standard(seed) if name == "standard" else Recipe.small(seed)


def _as_json(trained: "Trained", correction: "CorrectionAnswer | None" = None) -> str:
    answer = {
        "weights": str(trained.weights),
        "card": str(trained.card),
        "curves": str(trained.curves),
        "improved": trained.improved,
        "evaluation": trained.evaluation,
        "correction": correction,
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()


def _as_text(trained: "Trained") -> str:
    return f"{trained.card.read_text().rstrip()}\n\nweights: {trained.weights}\ncurves: {trained.curves}"


@contextmanager
def _progress_bar() -> "Iterator[Callable[[Progress], None] | None]":
    """A bar for each stage on the terminal's error stream, nothing where that is a file or a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    from ..progress import bar

    with bar(Console(stderr=True)) as shown:
        tasks: dict[str, TaskID] = {}

        def show(progress: "Progress") -> None:
            stage = progress.stage.value
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=1.0)
            said = f"{stage.replace('_', ' ')}: {progress.text}"
            shown.update(tasks[stage], completed=progress.part, description=said)

        yield show
