"""Schedules in torch's notation: ``2F0`` is stage 2, forward, micro-batch 0; ``2B0`` its backward."""

import re
from dataclasses import dataclass
from enum import StrEnum

from ..errors import UsageError
from .plan import ScheduleKind

PLAYABLE = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
"""Schedules that this version orders, prices and runs."""
_NOTATION = re.compile(r"(\d+)([FB])(\d+)")


class Work(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one micro-batch."""

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """``"2F0"`` → stage 2, forward, micro-batch 0; UsageError where the text is not an action."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise UsageError(f"no action in {text!r}; an action is written like 2F0 or 2B0")
        return cls(int(match[1]), Work(match[2]), int(match[3]))


def stage_actions(
    kind: ScheduleKind, stage: int, num_stages: int, num_micro_batches: int
) -> tuple[Action, ...]:
    """The actions of one stage in order.

    1F1B starts with ``min(num_stages - stage, num_micro_batches)`` forwards, then alternates one backward
    with one forward; GPipe does all forwards first. Fewer micro-batches than stages are fine.
    """
    if kind is ScheduleKind.GPIPE:
        ahead = num_micro_batches
    elif kind is ScheduleKind.ONE_F_ONE_B:
        ahead = min(num_stages - stage, num_micro_batches)
    else:
        raise UsageError(f"schedule {kind} cannot be played yet; known: {', '.join(PLAYABLE)}")
    actions = [Action(stage, Work.FORWARD, m) for m in range(ahead)]
    for m in range(num_micro_batches):
        actions.append(Action(stage, Work.BACKWARD, m))
        if ahead + m < num_micro_batches:
            actions.append(Action(stage, Work.FORWARD, ahead + m))
    return tuple(actions)
