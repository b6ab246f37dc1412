"""A script of an elastic job in the words of the membership alone, paced by a file; its tests run it."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from arachne_runtime.membership.client import MemberClient, RefusedError
from arachne_runtime.membership.watch import Watch, leave_world
from tests.elastic_ranks import Fault, Rank

LEFT_OUT = 75


class Paced(Rank):
    """Waits before each step until the file ``limit`` allows it; tells each step in a file of its device."""

    def __init__(self, folder, *words) -> None:
        super().__init__(*words, Fault())
        self.folder = folder

    def step(self, step: int) -> None:
        while step > int((self.folder / "limit").read_text() or 0) and self.client.stop is None:
            time.sleep(0.02)
        super().step(step)

    def apply(self, step: int) -> None:
        super().apply(step)
        told = {"step": step, "loss": self.losses[step], "pid": os.getpid(), "by": self.client.generation}
        with (self.folder / f"told-{self.client.member.device}").open("a") as file:
            file.write(json.dumps(told) + "\n")

    def form(self, record) -> None:
        if self.client.member not in record.members:
            sys.exit(LEFT_OUT)
        super().form(record)


def address(name: str) -> tuple[str, int]:
    host, _, port = os.environ[name].rpartition(":")
    return host, int(port)


def main(folder: Path, num_steps: int) -> None:
    torch.set_num_threads(1)
    with os.fdopen(int(os.environ["ARACHNE_TOKEN_FD"])) as file:
        token = file.read()
    store = dist.TCPStore(*address("ARACHNE_STORE"), is_master=False, timeout=timedelta(seconds=30))
    device, coordinator = os.environ["ARACHNE_DEVICE"], address("ARACHNE_COORDINATOR")
    with Watch() as watch, MemberClient(coordinator, token, device, watch.on_stop) as client:
        signal.signal(signal.SIGTERM, lambda *_: client.leaving())
        with os.fdopen(int(os.environ["ARACHNE_MEMBER_FD"]), "w") as file:
            file.write(client.member.incarnation + "\n")
        rank = Paced(folder, client, watch, store, num_steps)
        try:
            rank.train()
        except RefusedError:
            sys.exit(LEFT_OUT)
        store.add("done", 1)  # nobody leaves the group before all have ended
        while store.add("done", 0) < dist.get_world_size():
            time.sleep(0.02)
        watch.release()
        leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
