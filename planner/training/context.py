"""What the stages of a training run share: recipe, folder, curves, and whom to tell how far it is."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import write_whole

from .curves import Curves
from .recipe import Recipe


class Stage(StrEnum):
    """Of a training run, in this order."""

    LABELS = "labels"
    IMITATION = "imitation"
    POLICY_GRADIENT = "policy_gradient"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a training run stands."""

    stage: Stage
    part: float
    """Of the stage, 0 to 1."""
    text: str
    """The latest figure."""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Context:
    """One run in one folder."""

    recipe: Recipe
    folder: Path
    curves: Curves
    on_progress: OnProgress | None

    @classmethod
    def at(
        cls, recipe: Recipe, folder: Path, on_progress: OnProgress | None, *, inputs: str = ""
    ) -> "Context":
        """A new run, or the one that was begun there; UsageError where that one is another.

        ``inputs``: digests of what the run learns from beside its recipe, nothing where it makes all itself.
        """
        folder.mkdir(parents=True, exist_ok=True)
        said = msgspec.json.format(msgspec.json.encode(recipe), indent=2).decode()
        recipe_path, inputs_path = folder / "recipe.json", folder / "inputs.txt"
        if recipe_path.exists():
            _is_the_same(recipe_path, said, "another recipe")
            _is_the_same(inputs_path, inputs, "other inputs: labels, or runs, profile and first weights")
        write_whole(inputs_path, inputs.encode())
        write_whole(recipe_path, said.encode())  # the last: what a killed start left is no run yet
        return cls(recipe, folder, Curves.at(folder / "curves.jsonl"), on_progress)

    def tell(self, stage: Stage, done: int, of: int, text: str) -> None:
        """So many steps of a stage are done."""
        if self.on_progress is not None:
            self.on_progress(Progress(stage=stage, part=done / max(1, of), text=text))


def _is_the_same(path: Path, said: str, other: str) -> None:
    """What an earlier run wrote of itself; nothing where it wrote none."""
    if (path.read_text() if path.exists() else "") != said:
        raise UsageError(
            f"{path.parent} holds a training run of {other} ({path.name}); give another folder, or "
            f"remove this one"
        )
