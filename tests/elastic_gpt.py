"""A training script as users write it, slowed down: it tells each step in a file, and ends where a file says.

``elastic_gpt.py FOLDER PAUSE_S``: alone or under any launcher.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import arachne_runtime as arachne
from tests.models import GPT, next_token_loss


def main(folder: Path, pause_s: float) -> None:
    tokens = torch.randint(31, (22, 8), generator=torch.Generator().manual_seed(1))
    told = folder / f"told-{os.environ.get('ARACHNE_DEVICE', 'alone')}"
    with arachne.Session() as session:
        engine = session.engine(
            lambda: GPT(tied=True).double(),  # so that rounding does not grow to be seen
            optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
            loss=next_token_loss,
            clip_norm=1.0,
        )
        for batch in session.batches(tokens, global_batch=12, seed=0, epochs=2000):
            report = engine.step(batch)
            line = {"step": engine.num_steps, "loss": report.loss, "pid": os.getpid()}
            with told.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if engine.num_steps == int((folder / "end").read_text()):
                break
            time.sleep(pause_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
