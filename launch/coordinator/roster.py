"""Which processes are there: their registration, and the signs of life of their nodes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from arachne_runtime.membership.messages import Frozen, Member
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.units import Seconds

from .settings import Settings


@dataclass(slots=True)
class Seat:
    """A registered process of a device."""

    member: Member
    connection: int | None
    """None: broken, and not made anew yet."""
    since_s: Seconds
    """When that became so."""
    frozen: Frozen | None = None
    """Its newest report."""
    ready: int = 0
    """The newest generation whose parts it has."""
    leaving: bool = False

    def report_of(self, generation: int) -> Frozen | None:
        """What it reported of this generation."""
        return self.frozen if self.frozen is not None and self.frozen.generation == generation else None


@dataclass(slots=True)
class Roster:
    """The seats by device, and when each node was last heard of."""

    settings: Settings
    seats: dict[str, Seat] = field(default_factory=dict)
    heard_s: dict[str, Seconds] = field(default_factory=dict)
    """By node."""
    suspected: set[str] = field(default_factory=set)
    """Nodes."""
    dead: set[str] = field(default_factory=set)
    """Incarnations that keep no state, should they wake."""
    done: set[str] = field(default_factory=set)
    """Incarnations whose script has come to its end."""

    def hear(self, node: str, now_s: Seconds) -> bool:
        """A sign of life; whether the node was suspected until now."""
        self.heard_s[node] = now_s
        was_suspected = node in self.suspected
        self.suspected.discard(node)
        return was_suspected

    def sit(self, member: Member, connection: int, now_s: Seconds) -> Seat:
        """Its seat, new or its old one; the caller has removed any other process of the device."""
        node = node_of(member.device)
        if node not in self.nodes:  # from now on its agent has as long as any to be heard
            self.hear(node, now_s)
        seat = self.seats.setdefault(member.device, Seat(member, connection, now_s))
        seat.connection, seat.since_s = connection, now_s
        return seat

    def seat(self, member: Member) -> Seat | None:
        """Of a process that lives."""
        found = self.seats.get(member.device)
        return found if found is not None and found.member == member else None

    def remove(self, seat: Seat) -> None:
        """It is dead for good."""
        del self.seats[seat.member.device]
        self.dead.add(seat.member.incarnation)
        node = node_of(seat.member.device)
        if node not in self.nodes:
            self.heard_s.pop(node, None)
            self.suspected.discard(node)

    def disconnect(self, connection: int, now_s: Seconds) -> None:
        """The connection of one process is broken: it may come back."""
        for seat in self.seats.values():
            if seat.connection == connection:
                seat.connection, seat.since_s = None, now_s

    def sleep(self, slept_s: Seconds, now_s: Seconds) -> None:
        """The coordinator heard nobody for so long, through no fault of theirs."""
        for node, heard_s in self.heard_s.items():
            self.heard_s[node] = min(now_s, heard_s + slept_s)
        for seat in self.seats.values():
            seat.since_s = min(now_s, seat.since_s + slept_s)

    def newly_suspected(self, now_s: Seconds) -> list[str]:
        """Nodes that have become too silent since the last look."""
        limit_s = self.settings.suspect_s
        silent = {node for node in self.nodes if now_s - self.heard_s[node] >= limit_s}
        fresh = sorted(silent - self.suspected)
        self.suspected |= silent
        return fresh

    def expired(self, now_s: Seconds) -> Iterator[tuple[Seat, str]]:
        """Seats that are to be removed, and why."""
        limit_s = self.settings.dead_s
        for device, seat in list(self.seats.items()):
            node = node_of(device)
            if now_s - self.heard_s[node] >= limit_s:
                yield seat, f"node {node} was silent for {limit_s:g} s"
            elif seat.connection is None and now_s - seat.since_s >= limit_s:
                yield seat, f"{device} has had no connection for {limit_s:g} s"

    @property
    def nodes(self) -> frozenset[str]:
        """Those of the seats."""
        return frozenset(node_of(device) for device in self.seats)

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that are there and stay, sorted."""
        return tuple(sorted(device for device, seat in self.seats.items() if self._stays(seat)))

    def _stays(self, seat: Seat) -> bool:
        return not seat.leaving and seat.member.incarnation not in self.done

    @property
    def members(self) -> frozenset[Member]:
        """All that live."""
        return frozenset(seat.member for seat in self.seats.values())
