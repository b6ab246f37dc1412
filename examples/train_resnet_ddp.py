"""Trains ResNet-18 on drawn shapes on several ranks, each with its part of every batch; for torchrun."""

import argparse
import itertools
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from resnet18 import ResNet18
from shapes import KINDS, Shapes

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--width", type=int, default=64, help="of the first level; 64 is ResNet-18")
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, even = dist.get_rank(), arguments.global_batch // dist.get_world_size()
torch.manual_seed(0)
data = Shapes()
model = ResNet18(len(KINDS), arguments.width)
model = torch.nn.parallel.DistributedDataParallel(model)
loader = torch.utils.data.DataLoader(data, even, sampler=torch.utils.data.DistributedSampler(data))
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
last = time.perf_counter()
for step, (pictures, kinds) in enumerate(itertools.islice(loader, arguments.steps)):
    loss = F.cross_entropy(model(pictures), kinds)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rows = len(kinds)
    told = torch.tensor([loss.item() * rows, rows], dtype=torch.float64)
    dist.all_reduce(told)
    mean = (told[0] / told[1]).item()
    now = time.perf_counter()
    if rank == 0:
        print(f"step {step:4d}  loss {mean:.4f}  {now - last:.3f} s  {rows} rows, even {even}", flush=True)
    last = now
dist.destroy_process_group()
