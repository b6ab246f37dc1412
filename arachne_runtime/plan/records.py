"""What the engine's hooks write down: a JSON line for each piece of a step, one for its peak of memory."""

from enum import StrEnum

from ..units import Bytes, Seconds
from .document import Document

WARM_UP_STEPS = 2
"""The first steps make connections and fill caches; they are left out where more follow."""


class RecordKind(StrEnum):
    """What a record measured."""

    ACTION = "action"
    COLLECTIVE = "collective"
    """Of a tensor-parallel or expert group, in the middle of an action."""
    REDUCE = "reduce"
    COMMIT = "commit"
    """The commit word: the wait for every rank is in it."""
    UPDATE = "update"
    MEMORY = "memory"
    """Takes no time."""
    STEP = "step"


APART = frozenset((RecordKind.ACTION, RecordKind.REDUCE, RecordKind.UPDATE))
"""Kinds whose seconds add up beside each other: the rest of a step is what is left of it without these."""


class Record(Document, frozen=True, kw_only=True):
    """One timed piece of a step on one rank. Times are seconds on the rank's own monotonic clock."""

    kind: RecordKind
    name: str
    """The action (``2F0``), collective (``ep all_to_all``), the segment's blocks (``7:26``), or the kind."""
    rank: int
    step: int
    plan: str
    """Digest of the plan that ran."""
    start_s: Seconds
    """Since the start of the step."""
    wait_s: Seconds = 0.0
    """Blocked until the input was there."""
    compute_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    """Spent posting or finishing sends."""
    samples: int = 0
    sent_bytes: Bytes = 0
    within: str = ""
    """The action that a collective belongs to."""
    peak_bytes: Bytes = 0
    """Most bytes of tensors at once on the rank's device, weights and optimizer states included."""
