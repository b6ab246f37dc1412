"""A coordinator as a process of its own: journal, port, token and devices on the command line."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

from arachne_runtime.membership.channel import new_token
from arachne_runtime.membership.client import ask_status
from arachne_runtime.membership.messages import Status
from launch.coordinator.server import serve
from launch.coordinator.settings import Settings
from launch.coordinator.worth import Offer

from .coordinator_world import plan_of

TOKEN = new_token()


class Coordinator:
    """The process of this module, which may be killed and started again on its port."""

    def __init__(self, folder: Path, devices: tuple[str, ...], module: str = __name__) -> None:
        self.folder, self.port, self.devices, self.module = folder, 0, devices, module
        self.start()

    def start(self) -> None:
        words = (str(self.folder / "journal"), str(self.port), TOKEN, *self.devices)
        command = [sys.executable, "-m", self.module, *words]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.port = int(self.process.stdout.readline())

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def status(self) -> Status:
        return ask_status(self.address, TOKEN, 10)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def await_log(self, words: str) -> None:
        end = time.monotonic() + 10
        while words not in self.log:
            assert time.monotonic() < end, f"{words!r} is not in\n{self.log}"
            time.sleep(0.02)


def plan_for(devices, running):
    if len(devices) < 2:
        return None
    return Offer(plan=plan_of(devices), samples_per_s=len(devices), running_samples_per_s=1)


def main(journal: str, port: str, token: str, *devices: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = Settings(devices=devices)
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
