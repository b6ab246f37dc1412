"""train_gpt_ddp.py with two lines changed: shares of the batch follow the devices.

torchrun --nproc-per-node 4 examples/train_gpt_unequal.py --global-batch 32
"""

import argparse
import itertools
import time

import torch.distributed as dist
from gpt import GPT, Config, StandardLibrary, adamw, next_byte_loss

import arachne_runtime as arachne

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
config = Config()
model = arachne.HeteroDDP(
    arachne.ModelParts.of(lambda: GPT(config)).whole(seed=0)
)  # was DistributedDataParallel
optimizer = adamw(model.parameters())
dataset = StandardLibrary(config.sequence)
loader = arachne.HeteroLoader(
    dataset, arguments.global_batch, drop_last=True
)  # was DataLoader, with a sampler
last = time.perf_counter()
for step, batch in enumerate(itertools.islice(loader, arguments.steps)):
    loss = next_byte_loss(model(batch[0]), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() * loader.num_rows / arguments.global_batch
    dist.all_reduce(mean)
    now = time.perf_counter()
    if rank == 0:
        print(
            f"step {step:4d}  loss {mean.item():.4f}  {now - last:.3f} s  shares {loader.shares}", flush=True
        )
    last = now
dist.destroy_process_group()
