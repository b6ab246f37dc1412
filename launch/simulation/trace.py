"""Which nodes of a cluster are there when: what a simulation replays, whatever file it came from."""

from dataclasses import dataclass, field

from arachne_runtime.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Nodes that go, and nodes that come, at one moment."""

    at_s: Seconds
    goes: tuple[str, ...] = ()
    comes: tuple[str, ...] = ()
    notice_s: Seconds = 0.0
    """So long before, those that go are told; 0: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events in order of time; nobody goes who is not there, nor comes who is."""

    name: str
    duration_s: Seconds
    here: tuple[str, ...]
    """Nodes that are there, and ready, at the start."""
    events: tuple[Event, ...] = field(default=())
