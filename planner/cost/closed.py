"""Closed forms of a pipeline's time for every schedule, vectorised over pipelines: they rank, never price.

The search ranks its templates with a form of its own (``planner.search.columns``), which counts messages by
the links of pools and knows circles of up to four neighbours only.
Derived from the rules of the event simulation (``simulate.py``, docs/cost-model.md); tests hold their error.
"""

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import ScheduleKind

from .actors import WEIGHTS_OF_BACKWARD

Seconds_KS = NDArray[np.float64]
"""One row for each pipeline, one column for each stage (or boundary)."""
Seconds_K = NDArray[np.float64]


APART = 0.3
"""How far an interleaved pipeline is from its slowest row to one whose rows wait at every chunk.

Fitted to 600 random pipelines of 2 to 5 rows with 2 or 3 unlike stages each (tests/test_closed_form.py)."""


def pipeline_seconds(
    kind: ScheduleKind,
    forward_s: Seconds_KS,
    backward_s: Seconds_KS,
    hop_s: Seconds_KS,
    micro_batches: NDArray[np.int64],
    *,
    num_rows: int | None = None,
) -> Seconds_K:
    """Seconds from the first forward to the last backward of each of K pipelines of S stages.

    ``forward_s``, ``backward_s``: [K, S] of one micro-batch, the slowest replica's, with what messages cost
    its device; ``hop_s``: [K, S - 1], what a message takes beside that, either way; ``micro_batches``: [K].
    ``num_rows``: sets of devices of interleaved pipelines.

    Against the event simulation, for messages of up to 0.3 forwards, the error is 0 for GPipe, at most 0.7 %
    on average (9 % at worst) for 1F1B, 0.5 % (13 %) for zero-bubble, 3.5 % (25 %; alike chunks: 1.2 %) for
    interleaved.
    """
    if kind is ScheduleKind.GPIPE:
        return _gpipe(forward_s, backward_s, hop_s, micro_batches)
    if kind is ScheduleKind.ZERO_BUBBLE:
        return _zero_bubble(forward_s, backward_s, hop_s, micro_batches)
    if kind is ScheduleKind.INTERLEAVED and num_rows not in (None, forward_s.shape[1]):
        assert num_rows is not None
        return _interleaved(forward_s, backward_s, hop_s, micro_batches, num_rows)
    return _one_f_one_b(forward_s, backward_s, hop_s, micro_batches)


def _gpipe(
    forward_s: Seconds_KS, backward_s: Seconds_KS, hop_s: Seconds_KS, micro_batches: NDArray[np.int64]
) -> Seconds_K:
    """Two flow shops of equal jobs; a receive is posted when the action before it starts."""
    widest = hop_s.max(axis=1, initial=0.0)
    slowest = np.maximum(forward_s.max(axis=1), widest) + np.maximum(backward_s.max(axis=1), widest)
    through = forward_s.sum(axis=1) + backward_s.sum(axis=1) + 2 * hop_s.sum(axis=1)
    found: Seconds_K = through + (micro_batches - 1) * slowest
    return found


def _one_f_one_b(
    forward_s: Seconds_KS, backward_s: Seconds_KS, hop_s: Seconds_KS, micro_batches: NDArray[np.int64]
) -> Seconds_K:
    """The heaviest of the paths that repeat.

    Stages a..c wait for each other in a circle: forwards down, backwards up, then a forward of a that
    is ``c - a + 1`` micro-batches later. Each circle is entered when the first micro-batch reaches a (and is
    turned M / width times), or when it has been to the last stage and back (M - 1 backwards, the forwards of
    its warm-up left out).
    """
    depth = forward_s.shape[1]
    down = _sums_before(forward_s)
    up = _sums_before(backward_s)
    hops = _sums_before(hop_s)
    through = down[:, -1] + up[:, -1] + 2 * hops[:, -1]
    best = through
    for a in range(depth):
        reached = down[:, a] + up[:, a] + 2 * hops[:, a]
        later = np.maximum(0, micro_batches - (depth - a))
        for c in range(a, depth):
            width = c - a + 1
            forward, backward = down[:, c + 1] - down[:, a], up[:, c + 1] - up[:, a]
            if a == c:
                forward, backward = _with_receives(forward, backward, hop_s, a)
            else:
                forward, backward = forward + hops[:, c] - hops[:, a], backward + hops[:, c] - hops[:, a]
            best = np.maximum(best, reached + micro_batches / width * (forward + backward))
            best = np.maximum(best, through + ((micro_batches - 1) * backward + later * forward) / width)
    return best


def _zero_bubble(
    forward_s: Seconds_KS, backward_s: Seconds_KS, hop_s: Seconds_KS, micro_batches: NDArray[np.int64]
) -> Seconds_K:
    """As 1F1B, with gradients of inputs in the circles and those of weights behind them.

    Stage a owes those of a micro-batches, so that many of its weights' gradients come after its last input's.
    """
    depth = forward_s.shape[1]
    weight_s = WEIGHTS_OF_BACKWARD * backward_s
    input_s = backward_s - weight_s
    down = _sums_before(forward_s)
    up = _sums_before(input_s)
    hops = _sums_before(hop_s)
    through = down[:, -1] + up[:, -1] + 2 * hops[:, -1]
    count = micro_batches
    last = weight_s[:, 0]
    best = through + last
    for a in range(depth):
        forward, back, weight = forward_s[:, a], input_s[:, a], weight_s[:, a]
        reached, returned = down[:, a] + hops[:, a], up[:, a] + hops[:, a]
        steady = np.maximum(0, count - 1 - np.minimum(a, count - 1))
        later = np.maximum(0, count - (depth - a))
        best = np.maximum(best, reached + count * (forward + back + weight))
        best = np.maximum(best, reached + returned + count * (forward + back) + steady * weight + last)
        best = np.maximum(best, through - returned + (count - 1) * back + later * forward + count * weight)
        best = np.maximum(best, through + (count - 1) * back + later * forward + steady * weight + last)
        for c in range(a + 1, depth):
            width, between = c - a + 1, hops[:, c] - hops[:, a]
            downs, ups = down[:, c + 1] - down[:, a] + between, up[:, c + 1] - up[:, a] + between
            best = np.maximum(best, reached + returned + count / width * (downs + ups + weight) + last)
            best = np.maximum(best, through + ((count - 1) * (ups + weight) + later * downs) / width)
    return best


def _interleaved(
    forward_s: Seconds_KS,
    backward_s: Seconds_KS,
    hop_s: Seconds_KS,
    micro_batches: NDArray[np.int64],
    num_rows: int,
) -> Seconds_K:
    """The row that is busy longest, moved towards rows that wait for each other at every chunk.

    With few micro-batches: one goes through all stages and back, the others follow it.
    """
    depth = forward_s.shape[1]
    both = forward_s + backward_s
    steps = both[:, :-1] + 2 * hop_s
    reached = _sums_before(steps)[:, :num_rows]
    rows = np.stack([both[:, row::num_rows].sum(axis=1) for row in range(num_rows)], axis=1)
    count = micro_batches[:, None]
    chunks = [slice(c, c + num_rows) for c in range(0, depth, num_rows)]
    in_step = sum(forward_s[:, c].max(axis=1) + backward_s[:, c].max(axis=1) for c in chunks)
    apart = (reached + (1 - APART) * count * rows).max(axis=1) + APART * micro_batches * in_step
    through = both.sum(axis=1) + 2 * hop_s.sum(axis=1)
    few = np.minimum(micro_batches, num_rows) - 1
    slowest = forward_s.max(axis=1) + backward_s.max(axis=1)
    follow = np.where(micro_batches <= num_rows, slowest, forward_s.min(axis=1) + backward_s.min(axis=1))
    busy = (reached + count * rows).max(axis=1)
    found: Seconds_K = np.maximum(np.maximum(busy, apart), through + few * follow)
    return found


def _with_receives(
    forward: Seconds_K, backward: Seconds_K, hop_s: Seconds_KS, stage: int
) -> tuple[Seconds_K, Seconds_K]:
    """A message lands one hop after the action before its own has started, so no action is shorter."""
    if stage > 0:
        backward = np.maximum(backward, hop_s[:, stage - 1])
    if stage < hop_s.shape[1]:
        forward = np.maximum(forward, hop_s[:, stage])
    return forward, backward


def _sums_before(values: Seconds_KS) -> Seconds_KS:
    """``[K, S + 1]``: what stands before each stage, and all of it."""
    return np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))
