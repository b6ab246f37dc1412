"""A small job that tells when it gets where: what bench.restarts kills once, and starts again.

``restarts_train FOLDER``: each rank appends lines ``what seconds`` to a file of its own there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import arachne_runtime as arachne

DIES_AT, EVERY = 3, 1


def main(folder: Path) -> None:
    with arachne.Session(device="cpu") as session:
        engine = session.engine(
            lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
            loss=lambda output, batch: output.square().mean(),
        )
        tell(folder, session.rank, "engine")
        session.checkpoints(folder / "checkpoints", every=EVERY)
        for batch in session.batches(torch.arange(20.0).view(10, 2), global_batch=4, epochs=4):
            if engine.num_steps == DIES_AT and session.rank == 1 and not (folder / "died").exists():
                (folder / "died").touch()
                tell(folder, session.rank, "killed")
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step(batch)
            tell(folder, session.rank, "step")


def tell(folder: Path, rank: int, what: str) -> None:
    with (folder / f"told-{rank}").open("a") as file:
        file.write(f"{what} {time.time()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
