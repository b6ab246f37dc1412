"""The coordinator of an elastic job in a process of its own, which may be killed and started again.

``python -m launch.elastic.coordinating`` reads `Duties` from its standard input, prints the port it listens
on, logs to standard error, and ends when that input closes.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan

from ..coordinator.planner_words import Problem
from ..coordinator.planning import Planner
from ..coordinator.server import serve
from ..coordinator.settings import Settings
from ..coordinator.shrink import Shrinker
from ..coordinator.worth import Offer


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
    """While fewer are there the job waits; a plan may do without some of them."""
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
    with plans_of(duties) as plans:
        await serve(
            Settings(devices=duties.plan.devices),
            Path(duties.journal),
            plans,
            duties.token,
            host=duties.host,
            port=duties.port,
            started=lambda port: print(port, flush=True),
            stop=stop,
            assume=plans.assume,
        )


@dataclass(frozen=True, slots=True)
class Plans:
    """What the coordinator asks, by a call, and what is told of devices that drift from their profile."""

    made_by: Planner | Shrinker
    min_devices: int

    def __call__(self, devices: tuple[str, ...], running: Plan | None) -> Offer | None:
        """The job's own plan first, where all its devices are there; None: no plan, or too few devices."""
        return self.made_by.plan_for(devices, running) if len(devices) >= self.min_devices else None

    def assume(self, slower: Mapping[str, float]) -> None:
        """Of use to a planner only."""
        if isinstance(self.made_by, Planner):
            self.made_by.assume(slower)


@contextmanager
def plans_of(duties: Duties) -> Iterator[Plans]:
    """From the planner where the job has a problem for it, else what is left of its plan."""
    with ExitStack() as held:
        planner = held.enter_context(Planner(duties.problem)) if duties.problem is not None else None
        yield Plans(planner or Shrinker(duties.plan), duties.min_devices)


def _stop_with_input(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin: a thread in it aborts an interpreter that ends by an error
            continue
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="leash", daemon=True).start()


if __name__ == "__main__":
    main()
