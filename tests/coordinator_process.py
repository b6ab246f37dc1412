"""A coordinator as a process of its own: journal, port and token on the command line, plans of replicas."""

import asyncio
import logging
import sys
from pathlib import Path

from launch.coordinator.server import serve
from launch.coordinator.settings import Settings
from launch.coordinator.worth import Offer

from .coordinator_world import plan_of


def plan_for(devices, running):
    if len(devices) < 2:
        return None
    return Offer(plan=plan_of(devices), samples_per_s=len(devices), running_samples_per_s=1)


def main(journal: str, port: str, token: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = Settings(devices=("a:0", "a:1", "b:0"))
    asyncio.run(
        serve(
            settings,
            Path(journal),
            plan_for,
            token,
            host="127.0.0.1",
            port=int(port),
            started=lambda port: print(port, flush=True),
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
