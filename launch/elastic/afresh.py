"""When a device of an elastic job gets a fresh process once its last one has ended, if ever."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from arachne_runtime.units import Seconds

from ..failure import Failure
from .words import LEFT_OUT_CODE, Gone

FIRST_PAUSE_S: Seconds = 1.0
LONGEST_PAUSE_S: Seconds = 60.0
"""Between a failure and the next process: 1, 2, 4 .. 60 s, until one trained and lived for ``LIVED_S``."""
LIVED_S: Seconds = 120.0
"""One that fails in its first steps after each join would stop all others each time."""
MOST_EARLY = 3
"""A device whose processes fail alike so often in a row, before they trained, gets no more."""


@dataclass(slots=True)
class _Device:
    began_s: float
    """When its process began, or will."""
    num_pauses: int = 0
    was_left_out: bool = False
    """And its successor began at once: a script that exits with that code would do so for ever."""
    num_early: int = 0
    """Failures alike in a row, of processes that never trained."""
    early: object = None
    """What is alike."""


@dataclass(slots=True)
class Afresh:
    """The devices of one job."""

    clock: Callable[[], float] = time.monotonic
    _devices: dict[str, _Device] = field(default_factory=dict)
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def after(self, gone: Gone, *, trained: bool, job_trained: bool = True) -> Seconds | None:
        """How long to wait before the next process; None: the device is given up.

        ``trained``: whether the process was a member of a generation that was completed; ``job_trained``:
        whether there was any such generation.
        """
        one = self._devices.setdefault(gone.device, _Device(self._began_s))
        if trained:
            one.num_early, one.early = 0, None
            if self.clock() - one.began_s >= LIVED_S:
                one.num_pauses, one.was_left_out = 0, False
        pause_s = self._pause(one, gone, trained, job_trained)
        one.began_s = self.clock() + (pause_s or 0.0)
        return pause_s

    def _pause(self, one: _Device, gone: Gone, trained: bool, job_trained: bool) -> Seconds | None:
        if gone.code == LEFT_OUT_CODE and trained and not one.was_left_out:
            one.was_left_out = True
            return 0.0
        # as long as nobody has trained no other failure explains that a connection is lost
        is_explained = job_trained and gone.failure is not None and gone.failure.is_consequence
        if gone.code != LEFT_OUT_CODE and not trained and not is_explained:
            alike = _alike(gone.code, gone.failure)
            one.num_early = one.num_early + 1 if alike == one.early else 1
            one.early = alike
            if one.num_early >= MOST_EARLY:
                return None
        one.num_pauses += 1
        return min(FIRST_PAUSE_S * 2.0 ** (one.num_pauses - 1), LONGEST_PAUSE_S)


def _alike(code: int, failure: Failure | None) -> object:
    if failure is None:
        return code
    if failure.lost_peer:  # its text has addresses, which differ each time
        return code, failure.kind
    return code, failure.kind, failure.text
