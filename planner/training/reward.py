"""What rollouts are worth by the closed form: templates with their best numbers, unlike ones side by side."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..policy.roll import Rollouts
from ..search.batch import Templates
from ..search.columns import Columns, Completion
from ..search.sand import best_numbers
from ..search.shapes import expanded

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUMBERS = 4
"""Copies with a micro-batch that are completed of a template that stands alone, the likeliest by sand.

What shares the batch with another template needs every number, to end at the same time."""

HALVINGS = 12
"""Of the bracket of an iteration time of unlike pipelines: to 0.02 % of it, below the error of the form."""


@dataclass(frozen=True, slots=True)
class _Ways:
    """Ways to complete a template of a rollout, those of one template beside each other."""

    place: Ints
    """``[N]``: which template of which rollout, ascending."""
    rollout: Ints
    """``[N]``"""
    fixed_s: Floats
    """Seconds before the first micro-batch counts."""
    each_s: Floats
    samples: Ints
    """Of one micro-batch of all copies."""
    alone_s: Floats
    """Seconds of an iteration if nothing else runs."""


def reward(completion: Completion, rollouts: Rollouts) -> Floats:
    """``[num]``: samples a second of each rollout's pipelines side by side; 0 where none of them fits."""
    seconds = seconds_of(completion, rollouts)
    return np.where(np.isfinite(seconds), completion.request.global_batch / seconds, 0.0)


def seconds_of(completion: Completion, rollouts: Rollouts) -> Floats:
    """``[num]``: of an iteration, ``inf`` where nothing fits; unlike pipelines end at about the same time."""
    alone = np.full(rollouts.num, np.inf)
    ways = _ways(completion, rollouts)
    if ways is None:
        return alone
    np.minimum.at(alone, ways.rollout, ways.alone_s)
    mixed = np.bincount(rollouts.rollout, minlength=rollouts.num) > 1
    return np.where(mixed & np.isfinite(alone), _side_by_side(completion, ways, alone), alone)


def _ways(completion: Completion, rollouts: Rollouts) -> _Ways | None:
    """The likeliest completions of each template; no more copies than its rollout left room for."""
    templates, origin = expanded(completion, rollouts.shapes)
    alone = np.bincount(rollouts.rollout, minlength=rollouts.num)[rollouts.rollout[origin]] == 1
    likely = np.zeros(len(templates), bool)
    likely[best_numbers(completion, templates, origin, NUMBERS)] = True
    kept = np.nonzero(likely | ~alone)[0]
    if not len(kept):
        return None
    templates, origin = templates.take(kept), origin[kept]
    merged = templates.width[:, 0] // np.maximum(1, rollouts.shapes.width[origin, 0])
    room = np.maximum(1, rollouts.copies[origin] // np.maximum(1, merged))
    t = templates
    capped = Templates(t.pool, t.tp, t.width, t.tile, np.minimum(t.copies, room), t.micro_batch)
    columns, done = _completed(completion, capped)
    if columns is None:
        return None
    counts = completion.counts(columns.templates)
    return _Ways(
        place=origin[done],
        rollout=rollouts.rollout[origin[done]],
        fixed_s=columns.seconds - counts * columns.slowest_s,
        each_s=columns.slowest_s,
        samples=columns.templates.copies * columns.templates.micro_batch,
        alone_s=columns.seconds,
    )


def _side_by_side(completion: Completion, ways: _Ways, alone: Floats) -> Floats:
    """The least time in which the templates of each rollout finish the global batch together."""
    places = np.bincount(np.unique(ways.place * len(alone) + ways.rollout) % len(alone), minlength=len(alone))
    high = np.where(np.isfinite(alone), alone, 1.0)
    low = high / np.maximum(1, places)
    first = np.nonzero(np.diff(ways.place, prepend=-1))[0]
    owner = ways.rollout[first]
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        count = np.floor((middle[ways.rollout] - ways.fixed_s) / ways.each_s * (1 + 1e-12))
        most = np.maximum.reduceat(np.maximum(0, count) * ways.samples, first)
        enough = np.bincount(owner, most, len(alone)) >= completion.request.global_batch
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def _completed(completion: Completion, templates: Templates) -> tuple[Columns | None, Ints]:
    """Columns, equal ones computed once, and the template of each; those that do not fit are left out."""
    columns = completion.columns(templates.distinct()) if len(templates) else None
    if columns is None:
        return None, np.empty(0, np.int64)
    place = {key: k for k, key in enumerate(_keys(columns.templates))}
    found = np.array([place.get(key, -1) for key in _keys(templates)], np.int64)
    kept = np.nonzero(found >= 0)[0]
    return (columns.take(found[kept]) if len(kept) else None), kept


def _keys(templates: Templates) -> list[bytes]:
    t = templates
    rows = np.concatenate([t.pool, t.tp, t.width, t.tile, t.copies[:, None], t.micro_batch[:, None]], axis=1)
    return [row.tobytes() for row in rows]
