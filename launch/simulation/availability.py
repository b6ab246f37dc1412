"""Who is there, who has joined and who is about to go, moment by moment: the same for every policy."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from arachne_runtime.units import Seconds

from .trace import Trace


class Turn(IntEnum):
    """What happens to nodes; at one moment in this order."""

    GOES = 0
    COMES = 1
    READY = 2
    """Its processes wait as joiners."""
    NOTICE = 3
    """It will go, and the job is told."""


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """One kind of turn at one time."""

    at_s: Seconds
    turn: Turn
    nodes: tuple[str, ...]
    gone_s: Seconds = 0.0
    """Of a notice: when they go."""


def moments(trace: Trace, start_s: Seconds) -> tuple[Moment, ...]:
    """All turns until the end, in order; a node that goes before it is ready never is."""
    found = []
    for number, event in enumerate(trace.events):
        if event.goes:
            found.append(Moment(event.at_s, Turn.GOES, event.goes))
        if event.goes and event.notice_s > 0:
            found.append(Moment(event.at_s - event.notice_s, Turn.NOTICE, event.goes, event.at_s))
        if event.comes:
            found.append(Moment(event.at_s, Turn.COMES, event.comes))
            ready_s = event.at_s + start_s
            stays = tuple(n for n in event.comes if not _goes_before(trace, number, n, ready_s))
            if stays and ready_s < trace.duration_s:
                found.append(Moment(ready_s, Turn.READY, stays))
    return tuple(sorted(m for m in found if m.at_s < trace.duration_s))


def _goes_before(trace: Trace, number: int, node: str, ready_s: Seconds) -> bool:
    for event in trace.events[number + 1 :]:
        if event.at_s > ready_s:
            return False
        if node in event.goes:
            return True
    return False


@dataclass(slots=True)
class Presence:
    """The nodes as they are now."""

    here: set[str]
    ready: set[str]
    leaving: dict[str, Seconds]
    """Those that were told, and when they go."""

    @classmethod
    def at_start(cls, trace: Trace) -> "Presence":
        """All that are there have joined."""
        return cls(set(trace.here), set(trace.here), {})

    def turn(self, moment: Moment) -> None:
        """What a moment changes."""
        nodes = set(moment.nodes)
        if moment.turn is Turn.GOES:
            self.here -= nodes
            self.ready -= nodes
            self.leaving = {name: at_s for name, at_s in self.leaving.items() if name not in nodes}
        elif moment.turn is Turn.COMES:
            self.here |= nodes
        elif moment.turn is Turn.READY:
            self.ready |= nodes
        else:
            self.leaving |= {name: moment.gone_s for name in moment.nodes if name in self.here}

    @property
    def usable(self) -> frozenset[str]:
        """Those that a new plan may use: ready, and not about to go."""
        return frozenset(self.ready - self.leaving.keys())


def sets_of(trace: Trace, start_s: Seconds) -> Iterator[frozenset[str]]:
    """Every set of nodes that is there or may be used at some moment."""
    now = Presence.at_start(trace)
    yield frozenset(now.here)
    for moment in moments(trace, start_s):
        now.turn(moment)
        yield frozenset(now.here)
        yield now.usable
