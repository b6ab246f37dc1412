"""Starts a job again when its ranks fail; its script goes on from its newest checkpoint by itself."""

import sys
from collections.abc import Callable

from .failure import RanksFailedError


def with_restarts(start: Callable[[], None], max_restarts: int) -> None:
    """Call ``start`` until no rank fails in it; what fails after ``max_restarts`` restarts is raised.

    Every failure is told when it happens.
    """
    for restart in range(1, max_restarts + 1):
        try:
            return start()
        except RanksFailedError as error:
            print(f"{error}\nrestart {restart} of {max_restarts}", file=sys.stderr, flush=True)
    return start()
