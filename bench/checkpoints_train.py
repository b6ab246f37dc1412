"""A small training that is killed before some steps, once each: what bench.checkpoints and a test restart.

``checkpoints_train FOLDER DEATHS``, the latter a JSON object from step to rank; rank 0 prints every loss.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import arachne_runtime as arachne

GLOBAL_BATCH, EPOCHS, EVERY = 4, 4, 2
"""Three steps an epoch of ten samples, the last of two."""


def losses(folder: Path | None, deaths: dict[str, int]) -> list[tuple[int, float]]:
    """Steps and losses of one session; without a folder there are no checkpoints."""
    found = []
    with arachne.Session(device="cpu") as session:
        engine = session.engine(
            lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
            loss=lambda output, batch: output.square().mean(),
        )
        if folder is not None:
            session.checkpoints(folder / "checkpoints", every=EVERY)
        data = torch.arange(20.0).view(10, 2)
        for batch in session.batches(data, global_batch=GLOBAL_BATCH, epochs=EPOCHS):
            if folder is not None and deaths.get(str(engine.num_steps)) == session.rank:
                die_once(folder / f"died-{engine.num_steps}")
            report = engine.step(batch)
            found.append((report.step, report.loss))
            session.print("loss", report.step, repr(report.loss))
    return found


def die_once(marker: Path) -> None:
    """As the kernel ends a process when memory runs out."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def told(text: str) -> list[tuple[int, float]]:
    """Steps and losses from the output of such a job."""
    found = (line.split("loss ", 1)[1].split() for line in text.splitlines() if "loss " in line)
    return [(int(step), float(loss)) for step, loss in found]


if __name__ == "__main__":
    losses(Path(sys.argv[1]), json.loads(sys.argv[2]))
