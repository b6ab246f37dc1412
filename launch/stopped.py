"""Ends a rank that is stopped (SIGSTOP) and does not go on: all others would wait up to their time limit."""

import os
import signal
import threading
from contextlib import suppress

from .processes import environment, every_pid, stat_fields

STOPPED_S = 5.0
"""How long a rank may be stopped; counted while this process runs, so that all may be stopped together."""
_POLL_S = 0.25


class StopWatch:
    """A thread that looks at the ranks of one run while it is entered."""

    def __init__(self, num_ranks: int, mark: bytes, limit_s: float | None = None) -> None:
        """Watch the children whose environment has ``mark``; no watch where ``limit_s`` is 0."""
        self.ended: set[int] = set()
        """Ranks that were stopped too long and killed."""
        self._num_ranks = num_ranks
        self._mark = mark
        self._polls = round((STOPPED_S if limit_s is None else limit_s) / _POLL_S)
        self._ranks: dict[int, int] = {}
        self._seen: set[int] = set()
        self._stopped: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stopped-ranks", daemon=True)

    def __enter__(self) -> "StopWatch":
        if self._polls:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._polls:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            if len(self._seen) < self._num_ranks:
                found = {pid: rank for pid in _children() if (rank := _rank(pid, self._mark)) is not None}
                self._ranks |= {pid: rank for pid, rank in found.items() if rank not in self._seen}
                self._seen |= set(found.values())
            for pid in list(self._ranks):
                self._look(pid)

    def _look(self, pid: int) -> None:
        state = stat_fields(pid)[:1]
        if not state:
            del self._ranks[pid]
        elif state != ["T"]:  # "t" is a debugger's
            self._stopped.pop(pid, None)
        else:
            self._stopped[pid] = self._stopped.get(pid, 0) + 1
            if self._stopped[pid] > self._polls:
                self.ended.add(self._ranks.pop(pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    mine = str(os.getpid())
    return [pid for pid in every_pid() if stat_fields(pid)[1:2] == [mine]]


def _rank(pid: int, mark: bytes) -> int | None:
    """Of a process of the run; None for any other, and before its program has begun."""
    words = environment(pid)
    rank = next((word for word in words if word.startswith(b"RANK=")), None)
    return int(rank.removeprefix(b"RANK=")) if rank is not None and mark in words else None
