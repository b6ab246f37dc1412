"""What the loss and the joining of a rank cost, on real processes over gloo, and that the losses stay.

Of issue 7 it covers point 1 for plans with whole states (several pipelines, unequal cuts, TP; any of four
ranks; not ZeRO, not the only holder of a block), point 2 by SIGSTOP, and point 3. In one job a random rank is
killed, or stopped, at a random moment; the survivors train on by another plan, of three devices; a fresh
process takes its place; and so on. The model has 10 MB of parameters. Processes and coordinator are those of
`arachne run --elastic`, without its islands: this process tells an exit when it sees it, and a stop after a
second, as an island does. ``bench.membership`` disturbs the whole command instead.

``--quick``: four events in each of two plans.
"""

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import arachne_runtime as arachne
from arachne_runtime.plan.plan import Plan

from .recovery_job import Job, Model, Tokens, job, loss, optimizer, plan_of, stage
from .report import Options, Result, at_most, run_bench

EVENTS, QUICK_EVENTS = 12, 4
"""In each plan; every fourth is a stop."""
INNER = 26_000
"""Of the MLPs: 10 MB of parameters in float64."""
PACE_S = 0.02
"""Between two steps: a step of a larger model takes longer than this one's."""
SEED = 7
STOPPED_S = 1.0
"""As long as an island waits before it tells that a process is stopped."""
DEVICES = ("a:0", "a:1", "a:2", "a:3")
NUM_STEPS = 100_000
"""More than are done."""


class Figures(NamedTuple):
    """Seconds, of each event."""

    killed_s: list[float]
    """From the signal to the next step that a survivor has finished."""
    stopped_s: list[float]
    pauses_s: list[float]
    """Of each survivor of each join."""
    gap: float
    """Largest difference of a loss from that of one process."""
    num_steps: int


def pipelines() -> tuple[Plan, ...]:
    """Two pipelines, cut unlike one another; without any rank a pipeline of two and one of a single stage."""
    a, b, c, d = DEVICES
    first = plan_of(
        (3, stage((0, 2), (2, a)), stage((2, 5), (2, b))), (3, stage((0, 3), (2, c)), stage((3, 5), (2, d)))
    )
    return first, *(
        plan_of((3, stage((0, 2), (2, x)), stage((2, 5), (2, y))), (3, stage((0, 5), (2, z))))
        for x, y, z in _threes()
    )


def tensors() -> tuple[Plan, ...]:
    """Two replicas of two tensor-parallel devices; without any rank two of them before the third."""
    a, b, c, d = DEVICES
    return plan_of((2, stage((0, 5), (4, a, b), (2, c, d)))), *(
        plan_of((2, stage((0, 3), (6, x, y)), stage((3, 5), (6, z)))) for x, y, z in _threes()
    )


def _threes() -> Iterator[tuple[str, ...]]:
    return (tuple(device for device in DEVICES if device != gone) for gone in DEVICES)


def measure(options: Options) -> Iterator[Result]:
    """Both plans."""
    events = QUICK_EVENTS if options.quick else EVENTS
    for name, plans in (("pipelines", pipelines()), ("tensors", tensors())):
        with tempfile.TemporaryDirectory(prefix="arachne-recovery-") as folder:
            found = disturbed(Path(folder), plans, events)
        print(f"{name}: {found.num_steps} steps, load {os.getloadavg()[0]:.1f}", flush=True)
        yield from _judged(name, found)


def _judged(name: str, found: Figures) -> Iterator[Result]:
    for what, times_s, bound_s in (
        ("kill", found.killed_s, 1.5),
        ("stop", found.stopped_s, 3.0),
        ("join", found.pauses_s, 0.3),
    ):
        print(f"{name}, {what}: {', '.join(f'{each:.3f}' for each in times_s)} s", flush=True)
        middle, span = statistics.median(times_s), (min(times_s), max(times_s))
        yield at_most(f"{name}-{what}", middle, "s, median", bound=bound_s, least_s=span[0], most_s=span[1])
    yield at_most(f"{name}-losses", found.gap, "from one process", bound=1e-9, num_steps=found.num_steps)


def disturbed(folder: Path, plans: tuple[Plan, ...], events: int) -> Figures:
    """One job and what happens to it."""
    chance, killed_s, stopped_s, pauses_s = random.Random(SEED), [], [], []
    with job(folder, plans, {}, num_steps=NUM_STEPS, inner=INNER, pace_s=PACE_S) as running:
        for device in DEVICES:
            running.hear(device, "step")
        for event in range(events):
            victim, stops = chance.choice(DEVICES), event % 4 == 3
            time.sleep(chance.uniform(0.3, 1.0))
            survivors = [device for device in DEVICES if device != victim]
            took_s = lose(running, victim, survivors, stops=stops)
            (stopped_s if stops else killed_s).append(took_s)
            running.start(victim)
            running.hear(victim, "step")
            pauses_s += [running.hear(device, "change")[2] for device in survivors]
        losses = dict(running.losses)
    last = max(losses)
    wanted = plain_losses(last + 1)
    gaps = (abs(each - wanted[step]) for step, found in losses.items() for each in found)
    assert set(losses) == set(range(last + 1)), "a step is missing"
    return Figures(killed_s, stopped_s, pauses_s, max(gaps), last + 1)


def lose(running: Job, victim: str, survivors: list[str], *, stops: bool) -> float:
    """Seconds until every survivor has finished a step of the next generation."""
    process = running.processes[victim]
    start_s = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP if stops else signal.SIGKILL)
    if stops:
        time.sleep(STOPPED_S)
        running.agent.stopped(running.members[victim])
    again_s = []
    for device in survivors:
        running.hear(device, "change")
        again_s.append(running.hear(device, "step")[1])
    if stops:
        process.kill()
    process.join()
    return max(again_s) - start_s


def plain_losses(num_steps: int) -> list[float]:
    """Of one process."""
    torch.set_num_threads(1)
    with arachne.Session() as session:
        engine = session.engine(lambda: Model(INNER).double(), optimizer=optimizer(INNER), loss=loss)
        batches = session.batches(Tokens(12 * NUM_STEPS), global_batch=12, seed=3)
        return [engine.step(batch).loss for batch, _ in zip(batches, range(num_steps), strict=False)]


if __name__ == "__main__":
    raise SystemExit(run_bench("recovery", measure))
