"""Ends a process that does not come out of a generation which has ended: its job went on without it."""

import os
import sys
import threading

from ..membership.client import Stop
from ..membership.messages import Freeze
from ..surroundings import LEFT_OUT_CODE
from ..units import Seconds

PATIENCE_S: Seconds = 35.0
"""More than a coordinator waits for the report of a rank (30 s by default)."""


class Patience:
    """A clock that runs from the word that a generation ends until this rank has left it.

    The word may come when the rank has left already: it failed first, and told so. Words come in the thread
    of the line, the rank leaves in its own.

    gloo does not end a send that is half written when its group breaks; it would keep the process, and so its
    device, until the time limit of the group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock: threading.Timer | None = None
        self._left = 0
        """The newest generation that was left."""
        self._is_over = False

    def on_stop(self, stop: Stop) -> None:
        """The generation ends."""
        if not isinstance(stop, Freeze):
            return
        with self._lock:
            if stop.generation > self._left and not self._is_over:
                self._cancel()
                self._clock = threading.Timer(PATIENCE_S, _give_up, (stop.why,))
                self._clock.daemon = True
                self._clock.start()

    def left(self, generation: int) -> None:
        """That generation was left."""
        with self._lock:
            self._left = max(self._left, generation)
            self._cancel()

    def close(self) -> None:
        """The job was left."""
        with self._lock:
            self._is_over = True
            self._cancel()

    def _cancel(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def _give_up(why: str) -> None:
    print(
        f"this process did not come out of its step in {PATIENCE_S:g} s after the generation ended ({why}); "
        "a fresh one takes its place",
        file=sys.stderr,
        flush=True,
    )
    os._exit(LEFT_OUT_CODE)
