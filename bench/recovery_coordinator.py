"""A coordinator as a process of its own that knows the plans of a job by the devices that are there."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import msgspec

from arachne_runtime.membership.channel import new_token
from arachne_runtime.plan.plan import Plan
from launch.coordinator.server import serve
from launch.coordinator.settings import Settings
from launch.coordinator.worth import Offer


class Coordinator:
    """It begins with the first plan's devices, and takes the plan of most devices of those that are there."""

    def __init__(self, folder: Path, plans: tuple[Plan, ...]) -> None:
        (folder / "plans").write_bytes(msgspec.json.encode(plans))
        self.folder, self.token = folder, new_token()
        command = [sys.executable, "-m", __name__, str(folder / "journal"), self.token, *plans[0].devices]
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    @property
    def log(self) -> str:
        """What it decided, and why."""
        return (self.folder / "log").read_text()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main(journal: str, token: str, *devices: str) -> None:
    """Serve until it is killed; the port goes to standard output."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    plans = msgspec.json.decode((Path(journal).parent / "plans").read_bytes(), type=tuple[Plan, ...])

    def plan_for(there: tuple[str, ...], running: Plan | None) -> Offer | None:
        fit = [plan for plan in plans if set(plan.devices) <= set(there)]
        best = max(fit, key=lambda plan: len(plan.devices), default=None)
        return best and Offer(plan=best, samples_per_s=len(best.devices), running_samples_per_s=1)

    settings, started = Settings(devices=devices), lambda port: print(port, flush=True)
    asyncio.run(serve(settings, Path(journal), plan_for, token, host="127.0.0.1", started=started))


if __name__ == "__main__":
    main(*sys.argv[1:])
