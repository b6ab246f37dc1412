"""The training script of the documentation, with a tiny model: runs alone and under any launcher.

``train_gpt.py OUT [PLAN]`` writes what each step reported to OUT, on rank 0.
"""

import json
import sys
from pathlib import Path

import torch

import arachne_runtime as arachne
from tests.models import GPT, next_token_loss


def main(out: str, plan: str | None = None) -> None:
    tokens = torch.randint(31, (22, 8), generator=torch.Generator().manual_seed(1))
    reports = []
    with arachne.Session(plan) as session:
        engine = session.engine(
            lambda: GPT(tied=True),
            optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
            loss=next_token_loss,
            clip_norm=1.0,
        )
        for batch in session.batches(tokens, global_batch=9, seed=0, epochs=2):
            report = engine.step(batch)
            session.print(f"step {report.step} loss {report.loss:.6f}")
            reports.append([report.num_rows, report.loss, report.grad_norm])
        if session.rank == 0:
            Path(out).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
