"""The coordinator of an elastic job in a process of its own, which may be killed and started again.

``python -m launch.coordinating`` reads `Duties` from its standard input, prints the port it listens on, logs
to standard error, and ends when that input closes.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan

from .coordinator.planner_words import Problem
from .coordinator.planning import Planner
from .coordinator.server import PlanFor, serve
from .coordinator.settings import Settings
from .coordinator.shrink import Shrinker
from .coordinator.worth import Offer


class Duties(Document, frozen=True, kw_only=True):
    """What the coordinator is told."""

    plan: Plan
    """The job's first."""
    journal: str
    token: str
    host: str
    port: int = 0
    """0: any."""
    min_devices: int = 1
    """No plan of fewer is taken: the job waits for more."""
    problem: Problem | None = None
    """For the planner; None: later plans are what is left of the first."""


def main() -> None:
    """Coordinate until standard input closes, whoever ended."""
    duties = msgspec.json.decode(sys.stdin.buffer.readline(), type=Duties)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    asyncio.run(_coordinate(duties))


async def _coordinate(duties: Duties) -> None:
    stop = asyncio.Event()
    _stop_with_input(stop)
    with plans_of(duties) as plan_for:
        await serve(
            Settings(devices=duties.plan.devices),
            Path(duties.journal),
            plan_for,
            duties.token,
            host=duties.host,
            port=duties.port,
            started=lambda port: print(port, flush=True),
            stop=stop,
        )


@contextmanager
def plans_of(duties: Duties) -> Iterator[PlanFor]:
    """What the coordinator asks: the job's own plan first, then the planner, or what is left of plans."""
    shrinker = Shrinker(duties.plan)
    with ExitStack() as held:
        planner = held.enter_context(Planner(duties.problem)) if duties.problem is not None else shrinker

        def plan_for(devices: tuple[str, ...], running: Plan | None) -> Offer | None:
            begins = running is None and set(duties.plan.devices) <= set(devices)
            offer = (shrinker if begins else planner).plan_for(devices, running)
            too_few = offer is None or len(offer.plan.devices) < duties.min_devices
            return None if too_few else offer

        yield plan_for


def _stop_with_input(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            continue
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="leash", daemon=True).start()


if __name__ == "__main__":
    main()
