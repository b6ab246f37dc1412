"""Labs on which unequal data parallelism is timed: 2 to 8 devices, speeds of 1:1 to 8:1, with slow links too.

Shares of a core add up to 1.8 at most, so that two cores do. Each device is a slice of one core, on which its
rank stays: where ranks roam they get in each other's way, and the largest, whose quota leaves it 2 ms of 10,
does not make up for it. On devices of 0.8, 0.4, 0.2 and 0.2 a step of 147 ms took 165 (beside other work).

Without a link computing binds: gradients are 0.9 MB. With one they are 3.3 MB over 200 Mbit/s.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from arachne_runtime.errors import UnsupportedEnvironmentError
from launch.lab import Lab, LabDevice, active
from launch.lab.document import LabNetwork
from launch.torchrun import run_ranks

from .unequal_records import Found, Task, read_found, write

COMPUTING = Task(width=64, layers=4, sequence=64, global_batch=128)
LINKED = Task(width=128, layers=4, sequence=16, global_batch=128)
NETWORK = LabNetwork(rate_Mbps=200)


def lab_of(shares: Sequence[float], network: LabNetwork | None) -> Lab:
    """Devices of these shares of a core, each a node of its own."""
    devices = (LabDevice(name=f"d{i}", share=share) for i, share in enumerate(shares))
    return Lab(device=tuple(devices), network=network)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A lab and what trains on it."""

    name: str
    shares: Sequence[float]
    """Of a core, by device; each is a node of its own."""
    task: Task
    network: LabNetwork | None = None

    @property
    def lab(self) -> Lab:
        """Its document."""
        return lab_of(self.shares, self.network)

    @property
    def ratio(self) -> float:
        """Fastest over slowest device."""
        return max(self.shares) / min(self.shares)


def cores_of(shares: Sequence[float], num_cores: int) -> tuple[int, ...]:
    """A core for each device: the largest first, each to the core that has most room left."""
    room, found = [1.0] * num_cores, [0] * len(shares)
    for device in sorted(range(len(shares)), key=lambda i: (-shares[i], i)):
        core = max(range(num_cores), key=lambda k: (room[k], -k))
        room[core] -= shares[device]
        found[device] = core
    return tuple(found)


FOUR = (0.8, 0.4, 0.2, 0.2)
EIGHT = (0.48, 0.48, 0.24, 0.24, 0.12, 0.12, 0.06, 0.06)

TWO_TRIALS = 8
"""Of the search: two devices have one share to move."""


def _task(task: Task, **changes: Any) -> Task:
    return msgspec.structs.replace(task, **changes)


QUICK = Case(
    name="4",
    shares=FOUR,
    task=_task(COMPUTING, rounds=2, trials=1, num_pairs=9, drift_steps=20, is_beside_even=True),
)
CASES = (
    Case(name="2-equal", shares=(0.9, 0.9), task=_task(COMPUTING, trials=TWO_TRIALS)),
    Case(name="2-double", shares=(0.9, 0.45), task=_task(COMPUTING, trials=TWO_TRIALS)),
    Case(name="2-eightfold", shares=(0.9, 0.1125), task=_task(COMPUTING, trials=TWO_TRIALS)),
    Case(name="4", shares=FOUR, task=_task(COMPUTING, drift_steps=40, is_beside_even=True)),
    Case(
        name="8",
        shares=EIGHT,
        task=_task(COMPUTING, sequence=32, global_batch=384),
    ),
    Case(name="2-linked", shares=(0.9, 0.225), task=_task(LINKED, trials=TWO_TRIALS), network=NETWORK),
    Case(name="4-linked", shares=FOUR, task=LINKED, network=NETWORK),
    Case(
        name="8-linked",
        shares=EIGHT,
        task=_task(LINKED, global_batch=256),
        network=NETWORK,
    ),
)


def run_on(lab: Lab, name: str, command: Sequence[str]) -> None:
    """A command on every device; UnsupportedEnvironmentError where the lab cannot be had in full."""
    with active(lab) as on:
        if lacking := [note for note in on.notes if "NOT enforced" in note or "not limited" in note]:
            raise UnsupportedEnvironmentError(f"lab {name} is not to be had here: {'; '.join(lacking)}")
        print(f"{name}: {'; '.join(on.notes)}", flush=True)
        run_ranks(on.state.devices, command, quiet=True)


def train_on(case: Case, folder: Path) -> Found:
    """Everything that is asked of one lab; UnsupportedEnvironmentError where it cannot be had in full."""
    task, out = folder / f"{case.name}-task.json", folder / f"{case.name}.json"
    cores = cores_of(case.shares, len(os.sched_getaffinity(0)))
    write(_task(case.task, cores=cores), task)
    run_on(case.lab, case.name, ["-m", "bench.unequal_train", str(task), str(out)])
    return read_found(out)
