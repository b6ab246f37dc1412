"""Train the byte-level GPT of gpt.py, or the Mixtral of mixtral.py, by a plan.

arachne run plan.json -- examples/train_gpt.py --global-batch 32
python examples/train_gpt.py --global-batch 32                      # one process, the whole model
python examples/train_gpt.py --model mixtral                       # its plans may share out experts
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import gpt
import mixtral

import arachne_runtime as arachne

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("gpt", "mixtral"), default="gpt")
parser.add_argument("--global-batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--log", type=Path, help="write one JSON line a step here")
arguments = parser.parse_args()

work = {"gpt": gpt.workload, "mixtral": mixtral.workload}[arguments.model]
with arachne.Session() as session:
    engine = session.engine(work.model, optimizer=work.optimizer, loss=work.loss)
    dataset = gpt.StandardLibrary(work.sequence)
    batches = session.batches(dataset, global_batch=arguments.global_batch, seed=0)
    log = arguments.log.open("w") if arguments.log and session.rank == 0 else None
    last = time.perf_counter()
    for batch in itertools.islice(batches, arguments.steps):
        report = engine.step(batch)
        now = time.perf_counter()
        session.print(f"step {report.step:4d}  loss {report.loss:.4f}  {now - last:.3f} s")
        if log:
            log.write(json.dumps({"step": report.step, "loss": report.loss, "seconds": now - last}) + "\n")
            log.flush()
        last = now
