"""Ends a process that does not come out of a generation which has ended: its job went on without it."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..membership.client import Stop
from ..membership.messages import Freeze
from ..surroundings import LEFT_OUT_CODE
from ..units import Seconds

PATIENCE_S: Seconds = 35.0
"""More than a coordinator waits for the report of a rank (30 s by default)."""


class Patience:
    """A clock that runs from the word that a generation ends until this rank has left it.

    The word may come when the rank has left already: it failed first, and told so. It does not run while the
    script does something else than train or evaluate, and may be writing a file. Words come in the thread of
    the line, the rank does the rest in its own.

    gloo does not end a send that is half written when its group breaks; it would keep the process, and so its
    device, until the time limit of the group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock: threading.Timer | None = None
        self._stop: Freeze | None = None
        """The newest word."""
        self._left = 0
        """The newest generation that was left."""
        self._counts = False
        self._is_over = False

    def on_stop(self, stop: Stop) -> None:
        """The generation ends."""
        if isinstance(stop, Freeze):
            with self._lock:
                self._stop = stop
                self._set()

    def left(self, generation: int) -> None:
        """That generation was left."""
        with self._lock:
            self._left = max(self._left, generation)
            self._set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, this rank may wait for others."""
        self._count(counts=True)
        try:
            yield
        finally:
            self._count(counts=False)

    def close(self) -> None:
        """The job was left."""
        with self._lock:
            self._is_over = True
            self._set()

    def _count(self, *, counts: bool) -> None:
        with self._lock:
            self._counts = counts
            self._set()

    def _set(self) -> None:
        """Start the clock, or stop it."""
        stop = self._stop
        runs = self._counts and not self._is_over and stop is not None and stop.generation > self._left
        if not runs and self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if runs and stop is not None and self._clock is None:
            self._clock = threading.Timer(PATIENCE_S, _give_up, (stop.why,))
            self._clock.daemon = True
            self._clock.start()


def _give_up(why: str) -> None:
    print(
        f"this process did not come out of its step in {PATIENCE_S:g} s after the generation ended ({why}); "
        "a fresh one takes its place",
        file=sys.stderr,
        flush=True,
    )
    os._exit(LEFT_OUT_CODE)
