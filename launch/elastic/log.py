"""What a person follows of an elastic job in its terminal: one line for each event, with the time of day."""

import re
import sys
import time
from contextlib import suppress

from arachne_runtime.membership.decision import Verdict
from arachne_runtime.membership.messages import Completed, Published, Record

from ..coordinator.actions import Entry

_NOISE = (" ignored: ", "connection from ")
"""In lines of the coordinator that are no event: who was declared dead speaks on for a while."""
_GLOOS_WORDS = re.compile(r"\[/\S+:\d+\] |\. This is typically caused by.*")
"""Where in gloo's sources an error was found, and its advice, which is none here."""
_STOPS = (": freezing, ", ": changing, ")
"""In lines of the coordinator: from the first of them on the job stands still, or will."""


def show(text: str) -> None:
    """Whole lines on standard error; whose reader has left, the job goes on."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class EventLog:
    """Lines on standard error, beside those of ranks."""

    def __init__(self) -> None:
        self.is_quiet = False
        """The job has ended: that its processes go is no event."""
        self._record: Record | None = None
        self._since_s: float | None = None
        """When what the newest generation answers was noticed."""

    def say(self, text: str) -> None:
        """One event."""
        if not self.is_quiet:
            show(f"[job {time.strftime('%H:%M:%S')}] {text}\n")

    def coordinator(self, line: str) -> None:
        """A line that the coordinator logged."""
        if self._since_s is None and any(words in line for words in _STOPS):
            self._since_s = time.monotonic()
        if not any(words in line for words in _NOISE):
            self.say(_GLOOS_WORDS.sub("", line).rstrip())

    def entry(self, entry: Entry) -> None:
        """An entry of the journal."""
        match entry:
            case Published(record=record):
                self._record = record
            case Completed() if self._record is not None:
                after = f", {time.monotonic() - self._since_s:.2f} s later" if self._since_s else ""
                self._since_s = None
                self.say(f"{_trains(self._record)}{after}{_decided(self._record)}")


def _trains(record: Record) -> str:
    return f"generation {record.generation} trains on {', '.join(m.device for m in record.members)}"


def _decided(record: Record) -> str:
    if not record.holders:
        return "; nobody held its state: from a checkpoint, or anew" if record.generation > 1 else ""
    if (decision := record.decision) is None:
        return ""
    done = "applied" if decision.verdict is Verdict.APPLY else "computed again"
    return f"; step {decision.step} {done}"
