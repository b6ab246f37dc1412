"""When a device of an elastic job gets a fresh process once its last one has ended, if ever."""

from dataclasses import dataclass, field

from arachne_runtime.units import Seconds

from ..failure import Failure
from .words import LEFT_OUT_CODE, Gone

FIRST_PAUSE_S: Seconds = 1.0
LONGEST_PAUSE_S: Seconds = 60.0
"""Between a failure and the next process: 1, 2, 4 .. 60 s, until one has trained."""
MOST_EARLY = 3
"""A device whose processes fail alike so often in a row, before they trained, gets no more."""


@dataclass(slots=True)
class _Device:
    num_pauses: int = 0
    num_early: int = 0
    """Failures alike in a row, of processes that never trained."""
    early: object = None
    """What is alike."""


@dataclass(slots=True)
class Afresh:
    """The devices of one job."""

    _devices: dict[str, _Device] = field(default_factory=dict)

    def after(self, gone: Gone, *, trained: bool) -> Seconds | None:
        """How long to wait before the next process; None: the device is given up.

        ``trained``: whether the process was a member of a generation that was completed.
        """
        one = self._devices.setdefault(gone.device, _Device())
        if trained:
            one.num_pauses, one.num_early, one.early = 0, 0, None
        if gone.code == LEFT_OUT_CODE:
            return 0.0 if trained else self._pause(one)
        if not trained and not (gone.failure is not None and gone.failure.is_consequence):
            alike = _alike(gone.code, gone.failure)
            one.num_early = one.num_early + 1 if alike == one.early else 1
            one.early = alike
            if one.num_early >= MOST_EARLY:
                return None
        return self._pause(one)

    def _pause(self, one: _Device) -> Seconds:
        one.num_pauses += 1
        return min(FIRST_PAUSE_S * 2.0 ** (one.num_pauses - 1), LONGEST_PAUSE_S)


def _alike(code: int, failure: Failure | None) -> object:
    return (code, failure.kind, failure.text) if failure is not None else code
