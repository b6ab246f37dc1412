"""A coordinator as a process of its own that knows the plans of a test by the devices that are there."""

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from arachne_runtime.plan.plan import Plan
from launch.coordinator.server import serve
from launch.coordinator.settings import Settings
from launch.coordinator.worth import Offer

from .coordinator_process import Coordinator


class Planned(Coordinator):
    """It begins with the first plan's devices, and takes the plan of most devices of those that are there."""

    def __init__(self, folder: Path, plans: tuple[Plan, ...]) -> None:
        (folder / "plans").write_bytes(msgspec.json.encode(plans))
        super().__init__(folder, plans[0].devices, module=__name__)


def main(journal: str, port: str, token: str, *devices: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    plans = msgspec.json.decode((Path(journal).parent / "plans").read_bytes(), type=tuple[Plan, ...])

    def plan_for(there: tuple[str, ...], running: Plan | None) -> Offer | None:
        fits = max(
            (plan for plan in plans if set(plan.devices) <= set(there)),
            key=lambda plan: len(plan.devices),
            default=None,
        )
        return fits and Offer(plan=fits, samples_per_s=len(fits.devices), running_samples_per_s=1)

    settings = Settings(devices=devices)
    started = lambda number: print(number, flush=True)  # noqa: E731
    asyncio.run(
        serve(settings, Path(journal), plan_for, token, host="127.0.0.1", port=int(port), started=started)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
