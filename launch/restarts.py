"""Starts a job again when its ranks fail; its script goes on from its newest checkpoint by itself."""

import sys
import time
from collections.abc import Callable

from arachne_runtime.units import Seconds

from .failure import NodeLostError, RanksFailedError

FIRST_PAUSE_S: Seconds = 1.0
LONGEST_PAUSE_S: Seconds = 60.0
"""Before the job starts again after the loss of a node, which may be rebooting: 1, 2, 4 .. 60 s."""


def with_restarts(
    start: Callable[[], None], max_restarts: int, pause: Callable[[Seconds], None] = time.sleep
) -> None:
    """Call ``start`` until no rank fails in it; what fails after ``max_restarts`` restarts is raised.

    Every failure is told when it happens.
    """
    pause_s = FIRST_PAUSE_S
    for restart in range(1, max_restarts + 1):
        try:
            return start()
        except (RanksFailedError, NodeLostError) as error:
            print(f"{error}\nrestart {restart} of {max_restarts}", file=sys.stderr, flush=True)
            if isinstance(error, NodeLostError):
                pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return start()
