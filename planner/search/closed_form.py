"""What completed templates take by a closed form: messages, circles of neighbours, zero-bubble."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import ScheduleKind

from ..cost.closed import pipeline_seconds

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDEST_CIRCLE = 4
"""Neighbours whose messages are looked at together: slow messages bind two to four, hardly ever more."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Seconds a micro-batch: waiting for messages by boundary, computing that they cost by stage."""

    down: Floats
    """``[K, S - 1]``"""
    up: Floats
    """``[K, S - 1]``"""
    forward: Floats
    """``[K, S]``: receiving, before a forward."""
    backward: Floats
    """``[K, S]``: receiving, before a backward."""
    tail: Floats
    """``[K, S]``: sending, behind both."""

    def times(self, number: int) -> "Messages":
        """So many for each."""
        return Messages(*(number * getattr(self, field.name) for field in fields(self)))


def closed_form(
    forward: Floats, backward: Floats, messages: Messages, sync: Floats, counts: Ints
) -> tuple[Floats, Floats, Floats]:
    """Seconds of one micro-batch more, of the pipeline, and of reductions that outlast it.

    (M - 1) max + sum, where a stage is no faster than its messages, and n neighbours pass on n micro-batches
    in no less than a forward down and a backward up all of them with the messages between. A stage's
    reduction starts when its own last backward is done, before those of the earlier stages.
    """
    size = forward.shape[1]
    forward, backward = forward + messages.forward, backward + messages.backward
    behind, before = np.pad(messages.down, ((0, 0), (0, 1))), np.pad(messages.up, ((0, 0), (1, 0)))
    slowest = np.maximum(forward, behind) + np.maximum(backward, before)
    slowest = np.maximum(slowest, forward + backward + messages.tail).max(axis=1)
    work, waits = forward + backward, messages.down + messages.up
    for span in range(2, min(size, WIDEST_CIRCLE) + 1):
        there = work[:, span - 1 :] > 0
        circle = _windows(work, span) + _windows(waits, span - 1)
        slowest = np.maximum(slowest, np.where(there, circle / span, 0).max(axis=1))
    through = work.sum(axis=1) + waits.sum(axis=1)
    earlier = np.cumsum(backward + before, axis=1) - backward
    outlasts = np.maximum(0.0, (sync - earlier).max(axis=1))
    return slowest, (counts - 1) * slowest + through, outlasts


def zero_bubble_s(forward: Floats, backward: Floats, messages: Messages, counts: Ints, depth: Ints) -> Floats:
    """``[K]``: seconds of the pipeline where gradients of weights wait until nothing else is to be done."""
    forward = forward + messages.forward + messages.tail / 2
    backward = backward + messages.backward + messages.tail / 2
    hop = np.maximum(messages.down, messages.up)
    seconds = np.zeros(len(depth))
    for size in np.unique(depth):
        of = depth == size
        seconds[of] = pipeline_seconds(
            ScheduleKind.ZERO_BUBBLE, forward[of, :size], backward[of, :size], hop[of, : size - 1], counts[of]
        )
    return seconds


def _windows(values: Floats, span: int) -> Floats:
    """Sums of every ``span`` neighbours."""
    sums = np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))
    return sums[:, span:] - sums[:, :-span]
