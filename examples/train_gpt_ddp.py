"""Trains the byte model of gpt.py on several ranks, each with its part of every batch; for torchrun."""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Config, StandardLibrary, adamw, next_byte_loss

import arachne_runtime as arachne

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--log", type=Path, help="write one JSON line a step here")
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, even = dist.get_rank(), arguments.global_batch // dist.get_world_size()
config = Config()
text = StandardLibrary(config.sequence)
model = arachne.ModelParts.of(lambda: GPT(config)).whole(seed=0)
model = torch.nn.parallel.DistributedDataParallel(model)
loader = torch.utils.data.DataLoader(text, even, sampler=torch.utils.data.DistributedSampler(text))
optimizer = adamw(model.parameters())
log = arguments.log.open("w") if arguments.log and rank == 0 else None
last = time.perf_counter()
for step, batch in enumerate(itertools.islice(loader, arguments.steps)):
    loss = next_byte_loss(model(batch[0]), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rows = len(batch[0])
    told = torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
    dist.all_reduce(told)
    mean = (told[0] / told[1]).item()
    now = time.perf_counter()
    if rank == 0:
        print(f"step {step:4d}  loss {mean:.4f}  {now - last:.3f} s  {rows} rows, even {even}", flush=True)
    if log:
        log.write(json.dumps({"step": step, "loss": mean, "seconds": now - last}) + "\n")
        log.flush()
    last = now
dist.destroy_process_group()
