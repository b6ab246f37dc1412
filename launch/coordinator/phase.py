"""What the coordinator waits for."""

from enum import StrEnum


class Phase(StrEnum):
    """Of a job; TRAINING is the only one in which ranks train, but for CHANGING."""

    GATHERING = "gathering"
    """The first devices."""
    RECOVERING = "recovering"
    """Those it knew before its restart."""
    TRAINING = "training"
    """Nothing: a generation is published, and completed once all its members are ready."""
    CHANGING = "changing"
    """All members to stop at the end of a step, for a planned change."""
    FREEZING = "freezing"
    """A report from each survivor of a failure."""
    PLANNING = "planning"
    """A plan for those that are there; all have reported."""
    WAITING = "waiting"
    """More devices: no plan fits these."""
    ENDED = "ended"
