"""Those that the newest record involves: who is there, who is done, and what they report."""

from collections.abc import Iterator
from dataclasses import dataclass

from arachne_runtime.membership.decision import Decision, decide
from arachne_runtime.membership.messages import Member

from .history import History
from .roster import Roster, Seat


@dataclass(frozen=True, slots=True)
class Team:
    """A look at both, as they are now."""

    history: History
    roster: Roster

    @property
    def seats(self) -> list[Seat]:
        """Of those that are there and have something to do still."""
        return [seat for member in self._undone() if (seat := self.roster.seat(member)) is not None]

    @property
    def missing(self) -> list[Member]:
        """Those that are not there and were not done."""
        return [member for member in self._undone() if self.roster.seat(member) is None]

    @property
    def some_are_done(self) -> bool:
        """Whether the script of any has come to its end."""
        return any(member.incarnation in self.roster.done for member in self.history.involved)

    @property
    def one_leaves(self) -> bool:
        """Whether a member has told that it will be ended."""
        record = self.history.record
        return any(seat.leaving for m in (record.members if record else ()) if (seat := self.roster.seat(m)))

    @property
    def unready(self) -> list[Seat]:
        """Members that have not got all parts of the newest record."""
        record = self.history.record
        assert record is not None
        return [seat for seat in self.seats if seat.member in record.members and not self._is_ready(seat)]

    @property
    def unreported(self) -> list[Seat]:
        """Who has not frozen in this generation."""
        return [seat for seat in self.seats if seat.report_of(self.history.generation) is None]

    @property
    def holders(self) -> frozenset[Member]:
        """Who holds state, as it reported."""
        return frozenset(seat.member for seat in self._holding())

    def decision(self) -> Decision | None:
        """About the open step, over those that hold state; StatesDifferError where no run gives that."""
        reports = [s.frozen.report for s in self._holding() if s.frozen and s.frozen.report]
        return decide(reports) if reports else None

    def _undone(self) -> Iterator[Member]:
        return (m for m in self.history.involved if m.incarnation not in self.roster.done)

    def _is_ready(self, seat: Seat) -> bool:
        return seat.ready >= self.history.generation

    def _holding(self) -> Iterator[Seat]:
        source = self.history.source(self.roster.members)
        for member in source.holders if source is not None else ():
            seat = self.roster.seat(member)
            frozen = seat.report_of(self.history.generation) if seat is not None else None
            if seat is not None and frozen is not None and frozen.report is not None:
                yield seat
