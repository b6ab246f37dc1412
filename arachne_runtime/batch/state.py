"""What has been learnt, as plain numbers for a checkpoint: ``msgspec.to_builtins`` makes lists of it."""

import msgspec

from ..units import Seconds
from .time_model import TimeModel

Row = tuple[float, ...]


class FitState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of ``LineFits``; by replica."""

    intercept: Row
    slope: Row
    information: tuple[Row, Row, Row]
    """a, b and c of each matrix."""
    variance: Row
    count: Row
    above: Row
    below: Row
    ratios: tuple[Row, Row, Row]


class BucketState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of ``BucketFits``; by replica, then by bucket."""

    count: Row
    mean: tuple[Row, ...]
    variance: tuple[Row, ...]
    reductions_s: tuple[tuple[Seconds, ...], ...]
    """By step, then by bucket."""


class LearnerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a ``Learner``."""

    num_buckets: int
    skip: int
    last: tuple[int, ...]
    skipped: tuple[bool, ...]
    drifted: bool
    fits: FitState
    buckets: BucketState


class BalancerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a ``Balancer``."""

    caps: tuple[int | None, ...]
    phase: str
    steps_in_phase: int
    explorations: int
    trial: tuple[int, ...]
    alert: int
    held: tuple[tuple[int, ...], ...]
    """Oldest first."""
    answers: tuple[tuple[int, ...], ...]
    model: TimeModel | None
    learner: LearnerState
