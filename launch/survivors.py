"""Ends what a rank started and left behind, in any session or process group."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .processes import environment, every_pid

SHUTDOWN_S = 5
"""How long ranks may take to end after a signal before they are killed."""


@contextmanager
def no_survivors(mark: bytes) -> Iterator[None]:
    """Kill every process whose environment has ``mark`` when the block is left."""
    try:
        yield
    finally:
        stop_at = time.monotonic() + SHUTDOWN_S
        while (left := _marked(mark)) and time.monotonic() < stop_at:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _marked(mark: bytes) -> list[int]:
    return [pid for pid in every_pid() if mark in environment(pid)]
