"""How long the coordinator waits for what."""

from dataclasses import dataclass

from arachne_runtime.units import Seconds

from .worth import HORIZON_S

BEAT_S: Seconds = 0.1
"""Time between two beats of an agent: five are missed before anyone suspects it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one job; the first three are of the design, the limits keep a job from waiting for ever."""

    devices: tuple[str, ...]
    """What the job begins with."""
    suspect_s: Seconds = 0.5
    """A node silent so long is told of."""
    dead_s: Seconds = 2.0
    """A node silent so long is dead, and so is a process without a connection."""
    restart_s: Seconds = 5.0
    """After a restart nobody is declared dead for so long."""
    gather_s: Seconds = 600.0
    """The job begins with the devices that are there by then."""
    freeze_s: Seconds = 30.0
    """A survivor that does not report by then is removed: only part (3) of a step lies before it."""
    step_s: Seconds = 600.0
    """Members that have not stopped for a planned change by then are told to freeze."""
    ready_s: Seconds = 600.0
    """A member that has not got its parts by then is removed."""
    plan_s: Seconds = 120.0
    """Survivors that have not got a plan by then count as ones that no plan fits yet; it may still come."""
    joiner_s: Seconds = 600.0
    """How long survivors that no plan fits wait for more devices."""
    horizon_s: Seconds = HORIZON_S
    """Over which time a planned change must pay for itself."""
