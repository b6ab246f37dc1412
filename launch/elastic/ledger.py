"""What the coordinator's journal tells whoever only reads it: who trains, and who ever did."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from arachne_runtime.membership.messages import Completed, Ended, Member, Published, Record

from ..coordinator.actions import Entry

_DECODER = msgspec.json.Decoder(Entry)


class Ledger:
    """A journal of this machine that grows meanwhile; reading it needs no lock."""

    def __init__(self, path: Path, heard: Callable[[Entry], None] = lambda entry: None) -> None:
        """``heard`` gets each entry once, when it counts already."""
        self.record: Record | None = None
        """The newest."""
        self.completed = 0
        """The newest generation in which all were ready; 0: none."""
        self.trained: set[str] = set()
        """Incarnations of all members of completed generations."""
        self.ended: Ended | None = None
        """That the job is over, as the coordinator has decided."""
        self._path = path
        self._heard = heard
        self._read_bytes = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the newest generation."""
        return () if self.record is None else self.record.members

    @property
    def step(self) -> int | None:
        """Which the newest generation computes first; None: nobody held a state, or it is the first one."""
        decision = self.record.decision if self.record is not None else None
        return decision.next_step if decision is not None else None

    def refresh(self) -> None:
        """Read what was written since the last look; a line that is not whole yet waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content.rfind(b"\n") + 1
        self._read_bytes += whole
        for line in content[:whole].splitlines():
            entry = _DECODER.decode(line.partition(b" ")[2])
            self._take(entry)
            self._heard(entry)

    def _take(self, entry: Entry) -> None:
        match entry:
            case Published(record=record):
                self.record = record
            case Completed(generation=number):
                self.completed = number
                self.trained |= {member.incarnation for member in self.members}
            case Ended():
                self.ended = entry
