"""What the engine's hooks write down: one JSON line for each action and each reduction of a step."""

from enum import StrEnum

from ..units import Bytes, Seconds
from .document import Document

WARM_UP_STEPS = 2
"""The first steps make connections and fill caches; they are left out where more follow."""


class RecordKind(StrEnum):
    """What a record measured."""

    ACTION = "action"
    REDUCE = "reduce"
    UPDATE = "update"
    STEP = "step"


class Record(Document, frozen=True, kw_only=True):
    """One timed piece of a step on one rank. Times are seconds on the rank's own monotonic clock."""

    kind: RecordKind
    name: str
    """The action (``2F0``), the segment's blocks (``7:26``), ``update`` or ``step``."""
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
