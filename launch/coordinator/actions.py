"""What the state machine asks its shell to do, in this order; it does nothing itself."""

from dataclasses import dataclass, field
from typing import TypeAlias

from arachne_runtime.membership.messages import Completed, Ended, Outbound, Published
from arachne_runtime.plan.plan import Plan

Entry: TypeAlias = Published | Completed | Ended
"""What the journal keeps."""


@dataclass(frozen=True, slots=True)
class Append:
    """Journal it, on the disk, before any action that follows."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Send:
    """Tell one connection."""

    connection: int
    message: Outbound


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a connection, once all is sent."""

    connection: int


@dataclass(frozen=True, slots=True)
class AskPlan:
    """Have a plan made, and hand it to `Machine.planned` with this number."""

    number: int
    devices: tuple[str, ...]
    running: Plan | None
    slower: dict[str, float] = field(default_factory=dict)
    """Devices that were measured to compute so many times longer than their profile says."""


@dataclass(frozen=True, slots=True)
class Log:
    """A line for a person."""

    text: str


Action: TypeAlias = Append | Send | Drop | AskPlan | Log
