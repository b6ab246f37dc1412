"""From the failures of many ranks to the one that a person needs: the first that no other explains."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from arachne_runtime.errors import UnsupportedEnvironmentError, WorkerFailedError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.placement import places
from arachne_runtime.plan.plan import Plan

SHOWN_LINES = 16
"""Lines of a traceback in a report."""
LONGEST_TEXT = 65_536
"""Characters of an error's text: all words of a failure stay below the 4 MiB of a line that others read."""
LONGEST_LINE = 1024
"""Likewise, of any other line."""
MOST_LINES = 128
"""Likewise, of each kind of them."""


class Failure(Document, frozen=True, kw_only=True):
    """How one rank ended."""

    rank: int
    where: str
    """Device, pipeline and stage, as text."""
    code: int
    """What the process exited with; negative: a signal."""
    time_s: float
    """When, in seconds since 1970; of an unrecorded death when it was noticed."""
    recorded: bool = False
    """Whether the rank itself wrote down its error."""
    kind: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    """Of its traceback where recorded, else the last of its standard error."""
    lost_peer: bool = False
    """It only says that another rank is gone."""
    unresponsive: bool = False
    """It did not end when it was asked to, after another rank had failed, and was killed."""
    stopped: bool = False
    """It was stopped (SIGSTOP), did not go on, and was killed."""
    traceback_file: str | None = None
    """Where its whole traceback was kept."""

    @property
    def is_consequence(self) -> bool:
        """Whether another failure explains this one."""
        return self.lost_peer or self.unresponsive or (not self.recorded and self.code == -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Report:
    """What a launch ends with when ranks failed."""

    failures: tuple[Failure, ...]
    num_ranks: int
    departed: tuple[int, ...] = ()
    """Ranks whose script had ended without an error before; known where all ranks are on one node."""
    is_whole: bool = False
    """Whether the failures of all ranks are here, so that no other place could tell more."""

    @property
    def root(self) -> Failure:
        """The failure that explains the others."""
        return min(
            self.failures,
            key=lambda f: (f.is_consequence, not f.unresponsive, not f.recorded, f.time_s, f.rank),
        )

    def __str__(self) -> str:
        """The root failure in words."""
        root, others = self.root, self.num_ranks - 1
        ended = (
            f"; the other {others} were ended" if others > 1 else "; the other was ended" if others else ""
        )
        last = f"rank {root.rank} exited with code {root.code}{ended}"
        return "\n".join([_headline(root), *self._cause(), *_details(root), last])

    def _cause(self) -> list[str]:
        """Where no failure here explains itself: what may have been the cause."""
        if not self.root.lost_peer:
            return []
        if not self.is_whole:
            return ["  another rank was lost: its own error is where its node's output goes"]
        if self.departed:
            ranks = ", ".join(map(str, self.departed))
            return [
                f"  before that, the script had ended without an error on rank {ranks}: "
                "every rank must take the same steps"
            ]
        return [
            "  no rank had failed before: one took longer than the others wait, Session(timeout_s=...), or "
            "was in another place of the script"
        ]


class RanksFailedError(WorkerFailedError):
    """Ranks of a job failed; says how the root of it did."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.rank, self.worker_code = report.root.rank, report.root.code
        super().__init__(str(report))


class NodeLostError(UnsupportedEnvironmentError):
    """A node of a job is gone, or could not be reached, and told of no failed rank."""


def where_in(plan: Plan) -> Callable[[int], str]:
    """Words for the place of a rank in a plan."""
    by_rank = {place.rank: place for place in reversed(places(plan))}

    def words(rank: int) -> str:
        place = by_rank[rank]
        return f"device {place.device}, pipeline {place.pipeline}, stage {place.stage}"

    return words


def read_failure(
    rank: int, where: str, code: int, noticed_s: float, data: Mapping[str, Any], tail: Sequence[str]
) -> Failure:
    """From torch's record of a failed process; ``data`` is what ``launch.worker`` wrote, if it could."""
    message = data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    if "kind" not in extra:
        return Failure(rank=rank, where=where, code=code, time_s=noticed_s, lines=_short(tail))
    fields = {k: extra[k] for k in ("kind", "text", "notes", "causes", "lines", "lost_peer", "time_s")}
    known = {"rank": rank, "where": where, "code": code, "recorded": True}
    words = {k: _short(fields[k]) for k in ("notes", "causes", "lines")}
    text = {"kind": _plain(fields["kind"], LONGEST_LINE), "text": _plain(fields["text"], LONGEST_TEXT)}
    return msgspec.convert({**fields, **words, **text, **known}, Failure)


def _short(lines: Sequence[str]) -> tuple[str, ...]:
    """The last of them, each cut to a length that a person reads."""
    return tuple(_plain(line, LONGEST_LINE) for line in lines[-MOST_LINES:])


def _plain(text: str, longest: int) -> str:
    """JSON carries no half of a surrogate pair, as names of files have; what is long keeps its beginning."""
    plain = text[:longest].encode("utf-8", "backslashreplace").decode()
    return plain if len(text) <= longest else f"{plain} ... ({len(text) - longest} more characters)"


def _headline(failure: Failure) -> str:
    start = f"rank {failure.rank} failed ({failure.where})"
    if failure.recorded and failure.kind == "SystemExit":
        return f"{start}: the script called sys.exit({failure.text})"
    if failure.recorded:
        return f"{start}: {failure.kind}: {failure.text}"
    if failure.stopped:
        return f"{start}: was stopped (SIGSTOP), did not go on, and was killed, since all others wait for it"
    if failure.unresponsive:
        return (
            f"{start}: did not answer: stopped (SIGSTOP, a debugger), or stuck in a call of the system; the "
            "others waited in vain, and it had to be killed"
        )
    if failure.code >= 0:
        return f"{start}: exited with code {failure.code}, without a Python error"
    name = signal.Signals(-failure.code).name if -failure.code in set(signal.Signals) else "an unknown signal"
    hint = "; the kernel sends it when memory runs out: see `dmesg`" if name == "SIGKILL" else ""
    return f"{start}: killed by signal {-failure.code} ({name}){hint}"


def _details(failure: Failure) -> list[str]:
    lines = [f"  {note}" for text in failure.notes for note in text.splitlines()]
    lines += [f"  caused by {cause}" for cause in failure.causes]
    left_out = len(failure.lines) - SHOWN_LINES
    if left_out > 0:
        lines.append(f"  ... {left_out} lines before")
    if failure.lines and not failure.recorded:
        lines.append("  its last words:")
    lines += [f"  {line.removeprefix('  ')}" for line in failure.lines[-SHOWN_LINES:]]
    return [*lines, f"  whole traceback: {failure.traceback_file}"] if failure.traceback_file else lines
