"""What checkpoints cost, beside torch.save of the same tensors, and that a job survives deaths in a row.

One process on the CPU with AdamW, in CPU time, since a disk has its own pace; both kinds of saves and loads
alternate, and medians are told. Then a job of two ranks under ``arachne run --max-restarts`` loses a worker
before each of ten steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.state.disk import sync
from arachne_runtime.state.holdings import holdings

from .checkpoints_train import losses, told
from .report import Options, Result, at_least, at_most, run_bench

WIDTH, BLOCKS = 1024, 8
QUICK_BLOCKS = 3
REPEATS = 5
DEATHS, QUICK_DEATHS = 10, 1
BOUND_S_PER_GB = 2.0
"""Of CPU time: a core then writes 0.5 GB/s, and ranks write side by side."""
BOUND_PAUSE = 0.5
"""Of a save's CPU time: the copy, without checksums and writing."""


def measure(options: Options) -> Iterator[Result]:
    """Costs first, on a machine that is still quiet."""
    with tempfile.TemporaryDirectory(prefix="arachne-checkpoints-") as scratch:
        yield from _costs(Path(scratch), QUICK_BLOCKS if options.quick else BLOCKS)
        yield _deaths(Path(scratch), QUICK_DEATHS if options.quick else DEATHS)


def _costs(folder: Path, blocks: int) -> Iterator[Result]:
    saves, loads, pauses = [], [], []
    size = 0
    for repeat in range(REPEATS):
        ours = folder / f"ours-{repeat}"
        with arachne.Session(device="cpu") as session:
            engine = _engine(session, blocks)
            checkpoints = session.checkpoints(ours, every=10**6)
            engine.step(torch.ones(2, WIDTH))
            plain = {f"{h.name} {h.key}": h.tensor for h in holdings(engine)}
            size = sum(tensor.nbytes for tensor in plain.values())
            saves.append(
                (_seconds(checkpoints.save), _seconds(partial(_plainly, plain, folder / "plain.pt")))
            )
        pauses.append(_pause(folder / f"background-{repeat}", blocks) / saves[-1][0])
        with arachne.Session(device="cpu") as session:
            _engine(session, blocks)
            mine = _seconds(partial(session.checkpoints, ours, every=10**6))
            loads.append((mine, _seconds(lambda: torch.load(folder / "plain.pt", weights_only=True))))
    for name, pairs in (("save", saves), ("load", loads)):
        mine, theirs = (median(seconds) / size * 1e9 for seconds in zip(*pairs, strict=True))
        yield at_most(
            f"{name}-cpu", mine, "s/GB", BOUND_S_PER_GB, torch_s_per_GB=theirs, bytes=size, seconds=pairs
        )
    yield at_most("background-pause-cpu", median(pauses), "of a save", BOUND_PAUSE, ratios=pauses)


def _engine(session: arachne.Session, blocks: int) -> arachne.Engine:
    return session.engine(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
        loss=lambda output, batch: output.square().mean(),
    )


def _pause(folder: Path, blocks: int) -> float:
    """CPU seconds of the training thread that a step with a save in the background takes longer."""
    with arachne.Session(device="cpu") as session:
        engine = _engine(session, blocks)
        session.checkpoints(folder, every=3, background=True)
        batch = torch.ones(2, WIDTH)
        engine.step(batch)
        before = _seconds(lambda: engine.step(batch), time.thread_time)
        return max(_seconds(lambda: engine.step(batch), time.thread_time) - before, 0.0)


def _plainly(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path)
    sync(path)


def _seconds(call: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    call()
    return clock() - start


def _deaths(folder: Path, count: int) -> Result:
    """Steps that were done right over all restarts; each worker dies by turns."""
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(device,), share=2),))
        for layers, device in (((0, 1), "a:0"), ((1, 3), "b:0"))
    )
    pipeline = Pipeline(micro_batches=2, micro_batch=2, stages=stages)
    write(Plan(model="tiny", global_batch=4, sequence=1, pipelines=(pipeline,)), folder / "plan.json")
    deaths = {str(step): step % 2 for step in range(1, count + 1)}
    command = [sys.executable, "-m", "launch", "run", str(folder / "plan.json"), "--max-restarts", str(count)]
    script = ["--", "-m", "bench.checkpoints_train", str(folder), json.dumps(deaths)]
    start = time.perf_counter()
    done = subprocess.run([*command, *script], capture_output=True, text=True, env=_here(), check=False)
    expected, found = dict(losses(None, {})), told(done.stdout)
    print(done.stderr[-2000:] if done.returncode else "", end="")
    right = {step for step, loss in found if abs(loss - expected[step]) <= 1e-5 * abs(expected[step])}
    wrong = len(found) - sum(step in right for step, _ in found)
    return at_least(
        "steps-after-deaths", (len(right) - wrong) / len(expected), "of all", 1.0,
        deaths=done.stderr.count("killed by signal 9"), redone=len(found) - len(right),
        seconds=time.perf_counter() - start,
    )  # fmt: skip


def _here() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


if __name__ == "__main__":
    raise SystemExit(run_bench("checkpoints", measure))
