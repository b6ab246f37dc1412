"""How good the first proposals are: the best plan of so many against the best that a long search knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.units import Seconds

from ..search.assemble import alike, plan_of
from ..search.batch import Templates
from ..search.columns import Columns
from ..search.judge import Judge
from ..search.propose import Source
from ..search.shapes import shapes_of
from .problem import Problem

Floats = NDArray[np.float64]

FAR = float(np.log(4))
"""What a problem counts for while nothing that fits was proposed, or only what is slower still."""

MOST_PRICED = 4
"""Best templates by the closed form, whose plans are priced: a search prices eight at its start."""


BEAM = 32
"""Likeliest shapes that a policy begins with where proposals are counted, not seconds."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One source on several problems: logarithms of seconds over the best known ones."""

    evaluations: tuple[int, ...]
    """Shapes that were completed with all their numbers."""
    lost: Floats
    """``[problems, evaluations]``: 0 is as good as the best known plan, 0.01 1 % slower; at most ``FAR``."""

    @property
    def mean(self) -> Floats:
        """``[evaluations]``"""
        return np.asarray(self.lost.mean(axis=0))

    @property
    def figures(self) -> dict[str, float]:
        """For the curves."""
        return {f"lost_at_{n}": float(v) for n, v in zip(self.evaluations, self.mean, strict=True)}


def standing(
    source: Source, problems: Sequence[Problem], evaluations: tuple[int, ...], seed: int = 0
) -> Standing:
    """The first proposals of a source on each problem: completed, and the best of them priced."""
    rows = []
    for problem in problems:
        seconds = np.array(list(_best(source, problem, evaluations, seed)))
        rows.append(np.clip(np.log(seconds / problem.best_s), -FAR, FAR))
    return Standing(evaluations, np.array(rows).reshape(len(problems), len(evaluations)))


def _best(source: Source, problem: Problem, evaluations: tuple[int, ...], seed: int) -> Iterator[Seconds]:
    """Iteration of the best plan after each number of proposals."""
    judge = Judge(problem.request, None, None)
    parts = list(_completed(source, problem, max(evaluations), seed))
    columns = Columns.joined([part for part, _ in parts]) if parts else None
    place = np.concatenate([at for _, at in parts]) if parts else np.empty(0, np.int64)
    for most in evaluations:
        early = np.nonzero(place < most)[0]
        if columns is not None and len(early):
            _price_best(problem, columns.take(early), judge)
        yield judge.best_s


def _completed(
    source: Source, problem: Problem, most: int, seed: int
) -> Iterator[tuple[Columns, NDArray[np.int64]]]:
    """Columns of the first shapes, and which proposal each belongs to."""
    place: dict[bytes, int] = {}
    for templates in source.batches(problem.completion, seed):
        at = np.array([place.setdefault(key, len(place)) for key in _keys(templates)], np.int64)
        columns = problem.completion.columns(templates.take(at < most))
        if columns is not None and len(columns):
            yield columns, np.array([place[key] for key in _keys(columns.templates)], np.int64)
        if len(place) >= most:
            return


def _price_best(problem: Problem, columns: Columns, judge: Judge) -> None:
    """Plans of the best columns; equal closed forms are one plan told in several ways."""
    _, first = np.unique(columns.seconds, return_index=True)
    for k in first[:MOST_PRICED].tolist():
        part = alike(columns, k, problem.request.global_batch)
        plan = plan_of(problem.completion, [part], by_stage=bool(columns.by_stage[k])) if part else None
        if plan is not None:
            judge.price(plan)


def _keys(templates: Templates) -> list[bytes]:
    """The shape of each, however many stages the array has room for."""
    shapes = shapes_of(templates)
    rows = np.stack([shapes.pool, shapes.tp, shapes.width], axis=2)
    return [row[:d].tobytes() for row, d in zip(rows, shapes.depth.tolist(), strict=True)]
