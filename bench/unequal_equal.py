"""What HeteroDDP and HeteroLoader cost on equal devices beside DistributedDataParallel and its DataLoader.

Both train the same blocks on as many rows a rank, in the same processes and in alternating turns of some
steps. HeteroDDP's shares are the balancer's, which has learnt before: on equal devices it finds that all are
alike, and goes on reading.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import arachne_runtime as arachne
from arachne_runtime.testing import run_ranks

from .overhead import Size, adamw, model
from .report import Result, at_most, interval

NUM_RANKS = 2
BOUND = 1.02
LEARNING_STEPS, QUICK_LEARNING_STEPS = 60, 24
STEPS = 4
"""Of a turn."""
WARM_UP = 2
"""Pairs of turns that are thrown away."""
NUM_SAMPLES = 2048


@dataclass(frozen=True)
class Cost:
    """A pair of turns: ours over theirs; CPU time summed over ranks, wall of the slowest."""

    cpu: float
    wall: float
    ours_s: float
    """Wall seconds of a step."""
    shares: tuple[int, ...]


def equal_results(quick: bool) -> Iterator[Result]:
    """CPU time and wall of a step, in pairs."""
    size, pairs = Size(256, sequence=32, blocks=6, rows=8), 12 if quick else 81
    learning = QUICK_LEARNING_STEPS if quick else LEARNING_STEPS
    size = replace(size, rows=4) if quick else size
    found = run_ranks(NUM_RANKS, costs, size, pairs, learning, timeout_s=600)[0]
    moved = sum(cost.shares != (size.rows,) * NUM_RANKS for cost in found)
    step_s = interval([cost.ours_s for cost in found]).median
    print(f"equal devices: a step {step_s * 1e3:.0f} ms; shares uneven in {moved} of {len(found)} turns")
    for kind in ("cpu", "wall"):
        values = [getattr(cost, kind) for cost in found]
        at = interval(values)
        print(f"equal devices: {kind} over DDP's {at}", flush=True)
        yield at_most(f"equal-{kind}", at.median, "of DDP's", bound=BOUND, low=at.low, high=at.high,
                      ratios=values)  # fmt: skip


def costs(size: Size, pairs: int, learning_steps: int) -> list[Cost]:
    """On every rank."""
    rows = torch.randn(2, NUM_SAMPLES, size.sequence, size.width)
    data = TensorDataset(*rows)
    loader = arachne.HeteroLoader(data, size.rows * NUM_RANKS, drop_last=True)
    sampler = DistributedSampler(data)
    usual = DataLoader(data, size.rows, sampler=sampler, drop_last=True)
    ours = _stepper(arachne.HeteroDDP(model(size)), loader)
    theirs = _stepper(DistributedDataParallel(model(size), gradient_as_bucket_view=True), usual)
    for _ in range(learning_steps):
        ours()
    found = []
    for index in range(WARM_UP + pairs):
        taken = {}
        for step in (ours, theirs) if index % 2 == 0 else (theirs, ours):
            if step is ours:
                loader.link.restart_clocks()  # its last sum was a turn ago
            taken[step] = _turn(step)
        (cpu, wall), (their_cpu, their_wall) = taken[ours], taken[theirs]
        if index >= WARM_UP:
            found.append(Cost(cpu / their_cpu, wall / their_wall, wall, loader.shares))
    return found


def _stepper(wrapped: nn.Module, loader: Iterable[Any]) -> Callable[[], None]:
    batches, optimizer = _endless(loader), adamw(wrapped.parameters())

    def step() -> None:
        inputs, targets = next(batches)
        loss = F.mse_loss(wrapped(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _turn(step: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of all ranks and wall seconds of the slowest, of a step."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        step()
    spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall], dtype=torch.float64)
    spent /= STEPS
    dist.all_reduce(spent[:1])
    dist.all_reduce(spent[1:], op=dist.ReduceOp.MAX)
    return spent[0].item(), spent[1].item()
