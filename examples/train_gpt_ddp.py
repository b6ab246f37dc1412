"""The same training with torch's DistributedDataParallel: every rank takes an equal part of the batch.

torchrun --nproc-per-node 4 examples/train_gpt_ddp.py --global-batch 32
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch.distributed as dist
from gpt import GPT, Config, StandardLibrary, adamw, next_byte_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import arachne_runtime as arachne

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--log", type=Path, help="write one JSON line a step here")
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
config = Config()
model = DistributedDataParallel(arachne.ModelParts.of(lambda: GPT(config)).whole(seed=0))
optimizer = adamw(model.parameters())
dataset = StandardLibrary(config.sequence)
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, arguments.global_batch // world_size, sampler=sampler, drop_last=True)
log = arguments.log.open("w") if arguments.log and rank == 0 else None
last = time.perf_counter()
for step, batch in enumerate(itertools.islice(loader, arguments.steps)):
    loss = next_byte_loss(model(batch[0]), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / world_size
    dist.all_reduce(mean)
    now = time.perf_counter()
    if rank == 0:
        print(f"step {step:4d}  loss {mean.item():.4f}  {now - last:.3f} s", flush=True)
    if log:
        log.write(json.dumps({"step": step, "loss": mean.item(), "seconds": now - last}) + "\n")
        log.flush()
    last = now
dist.destroy_process_group()
