"""What a simulation tells: samples and seconds by policy, and the curves to draw."""

import msgspec

from arachne_runtime.units import Seconds


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change of plan."""

    at_s: Seconds
    """Training began again."""
    standstill_s: Seconds
    """Since training ended."""
    nodes: int
    plan: str
    samples_per_s: float
    source: str
    """Where the state came from."""
    redone_steps: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy on one trace."""

    policy: str
    samples: float
    of_oracle: float
    """Its samples over those of the oracle."""
    seconds: dict[str, Seconds]
    """By what they went into; they add up to the duration."""
    changes: tuple[Change, ...]
    curve: tuple[tuple[Seconds, float], ...]
    """Time and samples; straight in between."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """All policies on one trace."""

    trace: str
    duration_s: Seconds
    model: str
    global_batch: int
    most_devices: int
    losses: int
    """Nodes that went."""
    joins: int
    """Nodes that came."""
    searches: int
    """Sets of devices that were planned for."""
    costs: dict[str, Seconds]
    """Every field of ``Costs``."""
    devices: tuple[tuple[Seconds, int], ...]
    """So many are there from that moment on."""
    outcomes: tuple[Outcome, ...]
    """The oracle first."""
