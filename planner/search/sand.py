"""Seconds of templates if blocks were sand: no exact cut, and a tenth of the time that completing them takes.

It tells which numbers of a shape, and which of many shapes, are worth an exact cut.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batch import Templates
from .columns import Completion, largest_shares
from .propose import GRANULARITY

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

HALVINGS = 12
"""Of the bracket of a stage's seconds, whose ends differ by 64 at the most: to 0.1 %, below the error."""

WIDEST = 64.0
"""How many times the even stage's seconds the slowest stage may take, where memory makes cuts uneven."""


def seconds_of_sand(completion: Completion, templates: Templates) -> Floats:
    """``[K]``: of an iteration; ``inf`` where a share was not measured or the model does not fit.

    Every stage takes as many blocks as its speed and its memory let it (``_level_s``); reductions and
    messages as the enumeration sees them (``propose``).
    """
    t = templates
    rows = completion.rows
    there = t.width > 0
    row = rows.of(t.pool, t.tp, largest_shares(t), t.width, t.tile)
    known, place = np.unique(row, return_inverse=True)
    place = place.reshape(row.shape)
    forward, backward = rows.whole(known)
    states, kept, room = rows.whole_bytes(known)
    good = ((row >= 0) == there).all(axis=1) & (t.depth <= rows.num_blocks)
    counts = completion.counts(t)
    held = np.minimum(counts[:, None], t.depth[:, None] - np.arange(row.shape[1]))
    plain = _Way.of(there & (row >= 0), (forward + backward)[place], (room / states)[place])
    # kept bytes of each micro-batch in flight, or once where the stage recomputes
    free = plain.pace > 0
    once = np.where(free, (room / (states + kept))[place], 0.0)
    all_held = np.where(free, room[place] / (states[place] + kept[place] * np.maximum(1, held)), 0.0)
    plain = _Way(plain.pace, np.minimum(1.0, all_held))
    again = _Way.of(free, (2 * forward + backward)[place], np.minimum(1.0, once))
    level, part = _level_s(plain, again)
    steps = np.maximum(1, counts - 1 + t.depth)
    work = steps * (1 + GRANULARITY * t.depth / rows.num_blocks) * level
    reductions = (_ring_s(completion, t) * part).max(axis=1)
    hops = np.where(t.depth > 1, (steps + t.depth) * _hops(completion, t).max(axis=1), 0.0)
    return np.asarray(np.where(good & np.isfinite(level), work + reductions + hops, np.inf))


def best_numbers(completion: Completion, templates: Templates, shape: Ints, each: int) -> Ints:
    """Which are the best few by sand of each shape ``[K]``, best first; none that cannot fit."""
    if not len(templates):
        return np.empty(0, np.int64)
    seconds = seconds_of_sand(completion, templates)
    by_shape = np.lexsort((seconds, shape))
    first = np.searchsorted(shape[by_shape], shape[by_shape], side="left")
    kept = by_shape[np.arange(len(by_shape)) - first < each]
    kept = kept[np.isfinite(seconds[kept])]
    return np.asarray(kept[np.argsort(seconds[kept], kind="stable")], np.int64)


@dataclass(frozen=True, slots=True)
class _Way:
    """What stages do with or without recomputation, all ``[K, S]``."""

    pace: Floats
    """Models a second; 0 where no stage is."""
    most: Floats
    """Parts of the model that memory holds."""

    @classmethod
    def of(cls, there: NDArray[np.bool_], seconds: Floats, most: Floats) -> "_Way":
        return cls(np.where(there, 1 / seconds, 0.0), np.where(there, most, 0.0))

    def part(self, level_s: Floats) -> Floats:
        """Of the model, within so many seconds ``[K]``."""
        return np.minimum(self.most, level_s[:, None] * self.pace)


def _level_s(plain: _Way, again: _Way) -> tuple[Floats, Floats]:
    """``[K]`` least seconds in which all stages have the whole model, and ``[K, S]`` what each has then.

    ``inf`` where memory does not hold it.
    """
    speed = plain.pace.sum(axis=1)
    with np.errstate(divide="ignore"):
        low = np.where(speed > 0, 1 / speed, np.inf)
    fits = np.maximum(plain.most, again.most).sum(axis=1) >= 1
    low = np.where(fits, low, 1.0)
    high = WIDEST * low
    tight = np.nonzero(fits & (plain.part(low * (1 + 1e-9)).sum(axis=1) < 1))[0]
    some = [_Way(way.pace[tight], way.most[tight]) for way in (plain, again)]
    least, most = low[tight], high[tight]
    for _ in range(HALVINGS):
        middle = np.sqrt(least * most)
        enough = np.maximum(some[0].part(middle), some[1].part(middle)).sum(axis=1) >= 1
        least, most = np.where(enough, least, middle), np.where(enough, middle, most)
    low[tight] = most
    part = np.maximum(plain.part(low), again.part(low))
    return np.where(fits, low, np.inf), part


def _ring_s(completion: Completion, t: Templates) -> Floats:
    """``[K, S]``: seconds to reduce all gradients of a model within the replicas of a stage."""
    request = completion.request
    parameters = request.tables.parameters(0, completion.rows.num_blocks)
    gradients = parameters * request.model.bytes_per_parameter.gradient
    members = np.maximum(1, t.copies[:, None] * t.width)
    inside = members * t.tp <= _node_sizes(completion)[t.pool]
    return np.asarray(completion.network.rings(t.pool, members, inside, t.tp) * gradients / t.tp)


def _hops(completion: Completion, t: Templates) -> Floats:
    """``[K, S]``: a micro-batch's way from a stage to another node, or back."""
    request = completion.request
    boundary = request.tables.output_bytes[len(request.model.blocks) // 2]
    node = _node_sizes(completion)[t.pool]
    each = np.maximum(1, _of_own_pool(t, t.tp * t.width))
    beside = np.minimum(np.maximum(1, node // each), t.copies[:, None])
    seats = np.minimum(np.maximum(1, node // t.tp), np.maximum(1, t.width) * beside)
    fixed, per_byte = completion.network.lines(t.pool, t.pool, np.zeros(t.pool.shape, bool), seats * t.tp)
    return np.where(t.width > 0, fixed + per_byte * boundary * largest_shares(t) / t.tp, 0.0)


def _of_own_pool(t: Templates, values: Ints) -> Ints:
    """``[K, S]``: the sum over the stages that share a stage's pool."""
    found = np.zeros_like(values)
    for pool in np.unique(t.pool):
        here = (t.pool == pool) & (t.width > 0)
        found = np.where(here, np.where(here, values, 0).sum(axis=1, keepdims=True), found)
    return found


def _node_sizes(completion: Completion) -> Ints:
    return np.array([pool.node_size for pool in completion.supply.pools], np.int64)
