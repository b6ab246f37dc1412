"""A small training of an elastic job: it tells each step in a file, and ends where a file says.

``membership_train FOLDER PAUSE_S``; alone it is the undisturbed run.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage

GLOBAL_BATCH, WIDTH, EVERY = 12, 16, 20
DEVICES = ("a:0", "a:1", "b:0", "b:1")


def two_pipelines() -> Plan:
    """Of two stages each, a node a pipeline."""
    return Plan(
        model="small",
        global_batch=GLOBAL_BATCH,
        sequence=1,
        pipelines=tuple(_pipeline(*DEVICES[i : i + 2]) for i in (0, 2)),
    )


def _pipeline(first: str, last: str) -> Pipeline:
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(device,), share=2),))
        for layers, device in (((0, 2), first), ((2, 5), last))
    )
    return Pipeline(micro_batches=3, micro_batch=2, stages=stages)


def main(folder: Path, pause_s: float) -> None:
    """One line a step: its number, loss, moment, and the plan's devices."""
    told = folder / f"told-{os.environ.get('ARACHNE_DEVICE', 'alone')}"
    data = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with arachne.Session(device="cpu") as session:
        engine = session.engine(
            lambda: nn.Sequential(
                nn.Linear(WIDTH, 32, dtype=torch.float64),
                nn.Tanh(),
                nn.Linear(32, 32, dtype=torch.float64),
                nn.Tanh(),
                nn.Linear(32, WIDTH, dtype=torch.float64),
            ),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
            loss=lambda output, batch: output.square().mean(),
        )
        session.checkpoints(folder / "checkpoints", every=EVERY)
        for batch in session.batches(data, global_batch=GLOBAL_BATCH, epochs=100_000):
            report = engine.step(batch)
            assert session.plan is not None
            line = {
                "step": engine.num_steps,
                "loss": report.loss,
                "time_s": time.monotonic(),
                "pid": os.getpid(),
                "devices": session.plan.devices,
            }
            with told.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if engine.num_steps >= int((folder / "end").read_text()):
                break
            time.sleep(pause_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
