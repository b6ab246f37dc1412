"""What finished weights are worth on problems that chose nothing of them: against chance and enumeration."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.files import write_whole

from ..policy.policy import Policy
from ..policy.sources import Learned, UniformRandom
from ..search.propose import Enumeration, Source
from .context import Context, Stage
from .problem import Problem
from .validate import BEAM, Standing, standing

Floats = NDArray[np.float64]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source: seconds over those of the best known plan, by number of proposals."""

    source: str
    mean_lost: tuple[float, ...]
    """Mean logarithm."""
    median_ratio: tuple[float, ...]
    within_2_percent: tuple[float, ...]
    """Part of the problems."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sources on the same problems."""

    num_problems: int
    evaluations: tuple[int, ...]
    rows: tuple[Row, ...]

    def row(self, source: str) -> Row:
        """Of one source."""
        return next(row for row in self.rows if row.source == source)


def evaluated(context: Context, policies: Mapping[str, Policy], problems: Sequence[Problem]) -> Evaluation:
    """The learned sources by name beside the others; read again where an earlier run wrote it down."""
    path = context.folder / "evaluation.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    sources: dict[str, Source] = {name: Learned(policy, beam=BEAM) for name, policy in policies.items()}
    sources |= {"uniform random": UniformRandom(), "enumeration": Enumeration()}
    rows = []
    for number, (name, source) in enumerate(sources.items(), 1):
        found = standing(source, problems, context.recipe.evaluations, context.recipe.seed)
        rows.append(_row(name, found))
        context.tell(Stage.EVALUATION, number, len(sources), f"{name} is {rows[-1].mean_lost[-1]:.3f} off")
    evaluation = Evaluation(
        num_problems=len(problems), evaluations=context.recipe.evaluations, rows=tuple(rows)
    )
    write_whole(path, msgspec.json.format(msgspec.json.encode(evaluation)))
    return evaluation


def _row(source: str, found: Standing) -> Row:
    return Row(
        source=source,
        mean_lost=_rounded(found.mean),
        median_ratio=_rounded(np.exp(np.median(found.lost, axis=0))),
        within_2_percent=_rounded((found.lost <= np.log(1.02)).mean(axis=0)),
    )


def _rounded(values: Floats) -> tuple[float, ...]:
    return tuple(round(float(v), 4) for v in values)
