"""The generations of a job so far, as the journal tells them: each is published once and completed once."""

from dataclasses import dataclass, replace
from functools import cached_property

from arachne_runtime.membership.messages import Completed, Ended, Member, Published, Record, Source

from .actions import Entry


class HistoryError(ValueError):
    """An entry that does not follow the last one."""


@dataclass(frozen=True)
class History:
    """The newest record and the newest generation that every member was ready in."""

    record: Record | None = None
    completed: int = 0
    ended: Ended | None = None
    """Nothing follows it."""

    @property
    def generation(self) -> int:
        """Of the newest record; 0: none."""
        return 0 if self.record is None else self.record.generation

    @property
    def is_completed(self) -> bool:
        """Whether all members have the parts of the newest record."""
        return self.record is not None and self.completed == self.record.generation

    @cached_property
    def involved(self) -> tuple[Member, ...]:
        """Whose loss ends the generation: its members, and until it is completed the holders."""
        if self.record is None:
            return ()
        holders = () if self.is_completed else self.record.holders
        return tuple(dict.fromkeys((*self.record.members, *holders)))

    def involves(self, member: Member) -> bool:
        """Whether a member is in `involved`."""
        return member in self._involved_set

    @cached_property
    def _involved_set(self) -> frozenset[Member]:
        return frozenset(self.involved)

    def source(self, lives: frozenset[Member]) -> Source | None:
        """What the next record starts from: a partly moved generation never counts."""
        if self.record is None:
            return None
        if self.is_completed:
            held = Source(generation=self.generation, plan=self.record.plan, holders=self.record.members)
        elif self.record.source is not None:
            held = self.record.source
        else:
            return None
        holders = tuple(member for member in held.holders if member in lives)
        return Source(generation=held.generation, plan=held.plan, holders=holders) if holders else None

    def after(self, entry: Entry) -> "History":
        """With one more entry; HistoryError where it does not follow."""
        match entry:
            case _ if self.ended is not None:
                raise HistoryError(f"{type(entry).__name__} cannot follow the end of the job")
            case Ended():
                return replace(self, ended=entry)
            case Published(record=record) if record.generation == self.generation + 1:
                return replace(self, record=record)
            case Completed(generation=number) if number == self.generation > self.completed:
                return replace(self, completed=number)
        raise HistoryError(
            f"{type(entry).__name__} cannot follow generation {self.generation}, completed {self.completed}"
        )
