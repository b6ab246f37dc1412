"""Shares of a core without root: a supervisor stops a rank that has used its CPU time, for a while.

Each device has a budget that grows with the wall clock at its share and shrinks by the CPU time of its
processes, so a rank that waits for a message is not stopped. Coarser than a kernel quota: see ``TOLERANCE``.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..processes import every_pid
from .state import start_ticks

PERIOD_S = 0.02
"""How often budgets grow; a rank that computes all the time runs ``share`` of each period."""
TOLERANCE = 0.08
"""Relative error of a share to expect over 1 s or more (measured: within 0.03, shares 0.05 to 0.8). Where
other processes want the same cores it falls short by more: only a quota's group is served first."""
_SCAN_S = 0.1
"""How often new processes are looked for."""
_SHORTEST_S = 0.0005
"""Shortest sleep of the supervisor: what a wake-up costs is then below a few percent of a core."""


@dataclass(slots=True)
class _Budget:
    """CPU time that one device may still use."""

    share: float
    roster: Path
    left_s: float = 0.0
    stopped: bool = False
    used_s: dict[int, float] = field(default_factory=dict)
    """CPU time so far, by process."""

    def follow(self) -> None:
        """Look for ranks that came, and for processes that they started (a rank leads its own session)."""
        sessions = {int(entry.name) for entry in self.roster.iterdir() if entry.name.isdigit()}
        members = {pid for pid in every_pid() if _session(pid) in sessions} if sessions else set()
        for pid in members - self.used_s.keys():
            self.used_s[pid] = _cpu_s(pid) or 0.0
            if self.stopped:
                _send(pid, signal.SIGSTOP)
        for pid in self.used_s.keys() - members:
            del self.used_s[pid]

    def settle(self, passed_s: float) -> float:
        """Book what passed, then stop or continue; returns seconds until the next decision matters."""
        for pid, before in list(self.used_s.items()):
            now = _cpu_s(pid)
            if now is not None:
                self.left_s -= now - before
                self.used_s[pid] = now
        self.left_s = min(self.left_s + self.share * passed_s, self.share * PERIOD_S)
        if self.left_s <= 0 and not self.stopped:
            self.turn(stop=True)
        elif self.stopped and self.left_s >= self.share * PERIOD_S * (1 - self.share):
            self.turn(stop=False)
        if self.stopped:
            return (self.share * PERIOD_S * (1 - self.share) - self.left_s) / self.share
        return self.left_s / max(1, len(self.used_s))

    def turn(self, *, stop: bool) -> None:
        """Stop or continue all processes of the device."""
        self.stopped = stop
        for pid in self.used_s:
            _send(pid, signal.SIGSTOP if stop else signal.SIGCONT)


class Supervisor:
    """A thread that keeps every device at its share until it is closed; then all of them run freely."""

    def __init__(self, shares: dict[Path, float]) -> None:
        self._budgets = [_Budget(share, roster) for roster, share in shares.items()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lab-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Continue whatever is stopped, and end."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last, scanned = time.monotonic(), 0.0
        while not self._ended.is_set():
            now = time.monotonic()
            if now - scanned > _SCAN_S:
                scanned = now
                for budget in self._budgets:
                    budget.follow()
            waits = [budget.settle(now - last) for budget in self._budgets]
            last = now
            self._ended.wait(min(max(min(waits), _SHORTEST_S), PERIOD_S))
        for budget in self._budgets:
            budget.turn(stop=False)


def register(roster: Path) -> None:
    """Tell the supervisor of ``roster`` that this process, a session leader, is a rank of its device."""
    (roster / str(os.getpid())).write_text(str(start_ticks(os.getpid())))


def free(roster: Path) -> None:
    """End the ranks that a dead supervisor may have left stopped."""
    if not roster.is_dir():
        return
    for entry in roster.iterdir():
        if entry.name.isdigit() and str(start_ticks(int(entry.name))) == entry.read_text():
            _send(int(entry.name), signal.SIGKILL)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _cpu_s(pid: int) -> float | None:
    """CPU time of all threads of another process; its clock is ``~pid << 3 | 2``, clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return None


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
