"""What the coordinator and its planner's process tell each other: a JSON record a line."""

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.plan.profile import Profile
from arachne_runtime.units import Seconds

from .worth import HORIZON_S, STANDSTILL_S, Offer

HURRIED_S: Seconds = 0.2
"""Of a search for survivors, who stand still meanwhile; the design's limit."""
PATIENT_S: Seconds = 2.0
"""Of a search beside training; a guess, from half a second on plans get little better (docs/policy.md)."""


class SupersededError(Exception):
    """A newer question is there: this one has no answer, which says nothing of plans."""


class Problem(Document, frozen=True, kw_only=True):
    """What does not change in a job."""

    cluster: Cluster
    """All devices that may ever come."""
    model: ModelSpec
    profile: Profile
    first: Plan
    """The job's first plan: its global batch is every plan's."""
    schedules: tuple[ScheduleKind, ...] = (ScheduleKind.ONE_F_ONE_B,)
    hurried_s: Seconds = HURRIED_S
    """Of a search, where a device of the running plan is gone."""
    patient_s: Seconds = PATIENT_S
    horizon_s: Seconds = HORIZON_S
    """Over which time a change must pay."""
    pause_s: Seconds = STANDSTILL_S
    """Standstill at a change, beside the time for the bytes that move."""


class Question(Document, frozen=True, kw_only=True):
    """A newer one takes the place of an older one that is not answered yet."""

    number: int
    devices: tuple[str, ...]
    running: Plan | None = None
    slower: dict[str, float] = {}  # noqa: RUF012 - msgspec copies mutable defaults
    """By device: how many times longer it computes than the profile says, where that differs."""


class Answer(Document, frozen=True, kw_only=True):
    """To the question of this number; without any of the rest it is of no use any more."""

    number: int
    offer: Offer | None = None
    no_plan: str = ""
    """Why none fits, or none can be priced."""
    fault: str = ""
    """An error that says nothing of plans."""
