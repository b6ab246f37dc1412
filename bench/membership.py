"""Random losses in one elastic job: ranks are killed or stopped, the coordinator and islands are killed.

``arachne run --elastic`` of two pipelines of two stages on four processes of this machine; after most events
the job has time to become whole again, after some it has not. Every step's loss is held against one process,
and the time from a signal to the next step without its rank is told by kind of event.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from arachne_runtime.errors import ArachneError
from arachne_runtime.membership.client import ask_status
from arachne_runtime.plan.files import write
from launch.coordinator.phase import Phase
from launch.elastic.job_file import find_job
from launch.processes import every_pid, stat_fields

from .membership_train import DEVICES, two_pipelines
from .report import Options, Result, at_least, at_most, run_bench

SEED, EVENTS, QUICK_EVENTS = 7, 100, 3
KINDS = ("kill", "kill", "stop", "two", "coordinator", "island")
WHOLE_S, HURRY = 90.0, 0.25
"""How long the job may take to become whole, and how often nobody waits for that."""
SOME_STEPS = 3
"""That each rank has done before the job counts as whole."""
PAUSE_S = 0.03
"""Between two steps of a rank."""
TAIL_STEPS = 60
"""Behind the last event: more than ranks do before all have read where the end is."""
BOUND_KILL_S, BOUND_STOP_S, BOUND_NODE_S = 1.5, 3.0, 4.0
"""Medians to the next step: of issue and design; a silent node counts as dead after 2 s."""
BOUND_LOSS = 1e-9
"""Relative; sums in float64 in another order."""


class Job:
    """The command, its files, and what can be done to its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.struck_s = 0.0
        """When the last event was."""
        write(two_pipelines(), folder / "plan.json")
        (folder / "end").write_text(str(10**9))
        words = [sys.executable, "-m", "launch", "run", "--elastic", str(folder / "plan.json")]
        script = ["--", "-m", "bench.membership_train", str(folder), str(PAUSE_S)]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen([*words, *script], stdout=log, stderr=log)

    def told(self, device: str) -> list[dict[str, Any]]:
        path = self.folder / f"told-{device}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def last_step(self) -> int:
        return max((told[-1]["step"] for device in DEVICES if (told := self.told(device))), default=0)

    def is_whole(self) -> bool:
        """Whether all devices train, and did some steps since the last event."""
        try:
            job = find_job(None)
            status = ask_status(job.address, job.token, 2)
        except (ArachneError, OSError):  # it begins, or its coordinator is away
            return False
        return status.phase == Phase.TRAINING and all(map(self._goes_on, DEVICES))

    def _goes_on(self, device: str) -> bool:
        told = self.told(device)[-SOME_STEPS:]
        is_new = len(told) == SOME_STEPS and told[0]["time_s"] > self.struck_s
        return is_new and self.rank(device) is not None and set(told[-1]["devices"]) == set(DEVICES)

    def await_(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        while not (found := condition()) and time.monotonic() < end_s and self.process.poll() is None:
            time.sleep(0.05)
        return found

    def rank(self, device: str) -> int | None:
        """The process that trained last on a device, if it still lives."""
        told = self.told(device)
        return told[-1]["pid"] if told and stat_fields(told[-1]["pid"])[:1] not in ([], ["Z"]) else None

    def coordinator(self) -> int | None:
        mine = [pid for pid in every_pid() if stat_fields(pid)[1:2] == [str(self.process.pid)]]
        return next((pid for pid in mine if b"launch.elastic.coordinating" in _words(pid)), None)

    def island(self, node: str) -> int | None:
        ranks = (self.rank(device) for device in DEVICES if device.startswith(node))
        return next((int(stat_fields(pid)[1]) for pid in ranks if pid is not None), None)

    def end(self) -> bool:
        """Ask for the end, and whether it came in order."""
        scratch = self.folder / "end.new"
        scratch.write_text(str(self.last_step + TAIL_STEPS))
        scratch.replace(self.folder / "end")
        self.await_(lambda: self.process.poll() is not None, WHOLE_S)
        return self.process.returncode == 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # one in the background ignores Ctrl-C
            self.process.wait(30)


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def measure(options: Options) -> Iterator[Result]:
    """One job; its log is kept beside the figures."""
    count = QUICK_EVENTS if options.quick else EVENTS
    with tempfile.TemporaryDirectory(prefix="arachne-membership-") as scratch:
        folder = Path(scratch)
        os.environ["XDG_RUNTIME_DIR"] = scratch
        job = Job(folder)
        try:
            events = _disturb(job, count)
            ended = job.end()
        finally:
            job.close()
        log = (folder / "log").read_text()
        if options.out is not None:
            (options.out / "membership.log").write_text(log)
        yield from _results(job, events, ended, log)


def _disturb(job: Job, count: int) -> list[tuple[str, tuple[str, ...], float]]:
    """Kind of each event, devices that it hit, and its moment."""
    rng, events = random.Random(SEED), []
    while len(events) < count and job.process.poll() is None:
        if not events or rng.random() >= HURRY:
            job.await_(job.is_whole, WHOLE_S)
        time.sleep(rng.uniform(0, 1))
        kind = rng.choice(KINDS)
        hit = _strike(job, kind, rng)
        if hit is not None:
            job.struck_s = time.monotonic()
            events.append((kind, hit, job.struck_s))
            print(f"event {len(events)}: {kind} {' '.join(hit)} at step {job.last_step}", flush=True)
    job.await_(job.is_whole, WHOLE_S)
    return events


def _strike(job: Job, kind: str, rng: random.Random) -> tuple[str, ...] | None:
    """None: there was nothing to hit just then."""
    if kind == "coordinator":
        return () if _sent(job.coordinator(), signal.SIGKILL) else None
    if kind == "island":
        node = rng.choice("ab")
        hit = tuple(device for device in DEVICES if device.startswith(node))
        return hit if _sent(job.island(node), signal.SIGKILL) else None
    chosen = rng.sample(DEVICES, 2 if kind == "two" else 1)
    number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
    return tuple(device for device in chosen if _sent(job.rank(device), number)) or None


def _sent(pid: int | None, number: signal.Signals) -> bool:
    try:
        if pid is not None:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    return pid is not None


def _results(
    job: Job, events: list[tuple[str, tuple[str, ...], float]], ended: bool, log: str
) -> Iterator[Result]:
    steps = [one for device in DEVICES for one in job.told(device)]
    last = max(one["step"] for one in steps)
    expected = _losses_alone(job.folder, last)
    worst = max(abs(one["loss"] / expected[one["step"] - 1] - 1) for one in steps)
    done = len({one["step"] for one in steps}) / last
    again = log.count("nobody held its state")
    kinds = {kind: sum(one[0] == kind for one in events) for kind in sorted(set(KINDS))}
    yield at_least("events-survived", float(len(events) if ended else 0), "events", len(events), **kinds)
    yield at_most("loss-difference", worst, "relative", BOUND_LOSS, steps=last)
    yield at_least("steps-done", done, "of all", 1.0, went_back_to_checkpoint=again)
    took = _times(steps, events)
    bounds = {"kill": BOUND_KILL_S, "two": BOUND_KILL_S, "stop": BOUND_STOP_S, "island": BOUND_NODE_S}
    for kind, bound in bounds.items():
        if took[kind]:
            figures = {"worst_s": max(took[kind]), "count": len(took[kind])}
            yield at_most(f"{kind}-to-next-step", median(took[kind]), "s", bound, **figures)


def _times(
    steps: list[dict[str, Any]], events: list[tuple[str, tuple[str, ...], float]]
) -> dict[str, list[float]]:
    """From each event to the first step by a plan without what it hit, unless another came between."""
    found: dict[str, list[float]] = defaultdict(list)
    ends = [moment for _, _, moment in events[1:]] + [float("inf")]
    for (kind, hit, at_s), end_s in zip(events, ends, strict=True):
        after = [
            one["time_s"]
            for one in steps
            if at_s < one["time_s"] < end_s and not set(hit) & set(one["devices"])
        ]
        if hit and after:
            found[kind].append(min(after) - at_s)
    return found


def _losses_alone(folder: Path, num_steps: int) -> list[float]:
    alone = folder / "alone"
    alone.mkdir()
    (alone / "end").write_text(str(num_steps))
    subprocess.run([sys.executable, "-m", "bench.membership_train", str(alone), "0"], check=True)
    return [json.loads(line)["loss"] for line in (alone / "told-alone").read_text().splitlines()]


if __name__ == "__main__":
    raise SystemExit(run_bench("membership", measure))
