"""What each rank of a lab of bench.unequal_dp runs: it learns shares, then times them beside others in turns.

All contestants train in the same processes. Even shares are torch's own DistributedDataParallel; all other
splits are HeteroDDP's. Peers are given the time model that ours has learnt.

``-m bench.unequal_train TASK FOUND``
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import arachne_runtime as arachne
from arachne_runtime.batch import Balancer, Phase, Reading
from arachne_runtime.data_parallel import bucket
from examples.gpt import GPT, Config, adamw, next_byte_loss

from .unequal_peers import cannikin, lb_bsp
from .unequal_records import Drift, Found, Shares, Task, read_task, write
from .unequal_search import climb

NUM_SAMPLES = 16_384
BUCKET_BYTES = 2**20
"""Of both: the model is small, and has as many buckets as one 25 times as large has by default."""
MOST_LEARNING_STEPS = 40
REBALANCES = 3
HOGS = 2
"""Processes beside rank 0 on its core: each of the three gets a third."""
SLOWED = 0
EVEN = "even DDP"
"""torch's own, among contestants."""


class Helm:
    """Shares by the balancer, or a split that is set."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.split: Shares | None = None
        self.log: list[Shares] = []
        """By step, since it was cleared."""
        self.readings: list[tuple[int, float]] = []
        """Seconds a sample of the rank that a drift slows, by step."""
        self.busy: dict[Shares, list[float]] = {}
        """Seconds that each rank computed when a split was last trained with."""

    @property
    def caps(self) -> tuple[int | None, ...]:
        return self.balancer.caps

    def observe(self, readings: Sequence[Reading]) -> None:
        busy = [one.outside_s + one.backward_s for one in readings]
        self.busy[tuple(one.samples for one in readings)] = busy
        if self.split is None:
            self.balancer.observe(readings)
        told = len(self.log) - 2  # told with the next step's gradients, heard at the next but one
        self.readings.append((told, busy[SLOWED] / max(readings[SLOWED].samples, 1)))

    def shares(self, global_batch: int) -> Shares:
        found = self.split or self.balancer.shares(global_batch)
        self.log.append(found)
        return found

    def limit(self, replica: int, cap: int) -> None:
        self.balancer.limit(replica, cap)

    @property
    def rebalances(self) -> int:
        """How often shares have changed."""
        return sum(a != b for a, b in pairwise(self.log))

    def release(self) -> None:
        """By the balancer from here on."""
        self.split, self.log, self.readings = None, [], []


@dataclass(frozen=True)
class Trainer:
    """A model that trains on batches without end."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]

    def step(self) -> None:
        batch = next(self.batches)
        loss = next_byte_loss(self.model(batch[0]), batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Crew:
    """The ranks of one lab."""

    def __init__(self, task: Task) -> None:
        self.task, self.num_ranks, self.num_races = task, dist.get_world_size(), 0
        config = Config(sequence=task.sequence, width=task.width, heads=4, layers=task.layers)
        tokens_NS = torch.randint(config.vocabulary, (NUM_SAMPLES, task.sequence + 1))
        data = TensorDataset(tokens_NS[:, :-1], tokens_NS[:, 1:])
        self.helm = Helm(Balancer(num_replicas=self.num_ranks))
        self.loader = arachne.HeteroLoader(data, task.global_batch, drop_last=True, sharing=self.helm)
        self.ours = _trainer(arachne.HeteroDDP(GPT(config), loader=self.loader), self.loader)
        sampler = DistributedSampler(data)
        even = DataLoader(data, task.global_batch // self.num_ranks, sampler=sampler, drop_last=True)
        self.even = _trainer(
            DistributedDataParallel(
                GPT(config), bucket_cap_mb=BUCKET_BYTES // 2**20, gradient_as_bucket_view=True
            ),
            even,
        )

    def learn(self) -> int:
        """Train until the balancer has settled behind its third change of shares; how many steps."""
        self.helm.release()
        for step in range(MOST_LEARNING_STEPS):
            self.ours.step()
            settled = self.helm.balancer.phase is Phase.BALANCED
            if self.helm.rebalances >= REBALANCES and settled:
                return step + 1
        return MOST_LEARNING_STEPS

    def splits(self) -> dict[str, Shares]:
        """Ours, and those of peers for the same model."""
        balancer, total = self.helm.balancer, self.task.global_batch
        bounds = [1] * self.num_ranks, [total] * self.num_ranks
        model = balancer.model()
        return {
            "lb-bsp": lb_bsp(model, total, *bounds),
            "cannikin": cannikin(model, total, *bounds),
            "ours": balancer.shares(total),
        }

    def turn(self, split: Shares | None) -> float:
        """Seconds of a step with this split; None: torch's own DDP, even shares."""
        trainer = self.even if split is None else self.ours
        self.helm.split = split
        self.loader.link.restart_clocks()
        trainer.step()  # the first one at another share is not judged: caches, kernels
        dist.barrier()
        self.loader.link.restart_clocks()  # else the wait at the barrier were read as computing
        start = time.perf_counter()
        for _ in range(self.task.steps):
            trainer.step()
        dist.barrier()
        return _first_ranks((time.perf_counter() - start) / self.task.steps)

    def in_turns(
        self, names: Iterable[str], split_of: Callable[[str], Shares | None], rounds: int
    ) -> dict[str, list[float]]:
        """Seconds of a step by contestant and round; every other round the other way round."""
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in taken if number % 2 == 0 else reversed(taken):
                taken[name].append(self.turn(split_of(name)))
        return taken

    def race(self, one: Shares, other: Shares) -> float:
        """Time of a split over that of another; every other race the other way round."""
        self.num_races += 1
        if self.num_races % 2:
            return self.turn(one) / self.turn(other)
        return 1 / (self.turn(other) / self.turn(one))

    def busy(self, split: Shares) -> list[float]:
        """Seconds that each rank computes in a step with this split."""
        while split not in self.helm.busy:  # a step is heard of two steps later
            self.turn(split)
        return self.helm.busy[split]

    def drift(self) -> Drift:
        """Train; train while hogs slow rank 0; train again."""
        steps = self.task.drift_steps
        self.helm.release()
        self.loader.link.restart_clocks()
        self._steps(steps)
        begun = len(self.helm.log)
        with _hogs(HOGS if dist.get_rank() == SLOWED else 0):
            self._steps(steps)
        ended = len(self.helm.log)
        self._steps(steps)
        return Drift(shares=self.helm.log, readings=self.helm.readings, slowed=(begun, ended))

    def _steps(self, steps: int) -> None:
        for _ in range(steps):
            self.ours.step()


def _trainer(model: nn.Module, loader: Iterable[Any]) -> Trainer:
    return Trainer(model, adamw(model.parameters()), _endless(loader))


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _first_ranks(value: float) -> float:
    """What the first rank has measured, on all."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(values, src=0)
    return values.item()


def _stay_on_core(cores: Sequence[int]) -> None:
    """Compute on the core of this rank's device, with all that this process starts."""
    if cores:
        there = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {there[cores[dist.get_rank()]]})


@contextmanager
def _hogs(count: int) -> Iterator[None]:
    """Processes that compute without end, in this process's group and on its core."""
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@contextmanager
def _small_buckets() -> Iterator[None]:
    before = bucket.FIRST_BYTES, bucket.BUCKET_BYTES
    bucket.FIRST_BYTES = bucket.BUCKET_BYTES = BUCKET_BYTES
    try:
        yield
    finally:
        bucket.FIRST_BYTES, bucket.BUCKET_BYTES = before


def compete(task: Task) -> Found:
    """All that a lab is asked."""
    _stay_on_core(task.cores)
    with _small_buckets():
        return _compete(Crew(task))


def _compete(crew: Crew) -> Found:
    task = crew.task
    learning_steps = crew.learn()
    rebalances, splits = crew.helm.rebalances, crew.splits()
    predicted_s = crew.helm.balancer.predicted_s(splits["ours"])
    timed = _first_alike(splits)
    taken = crew.in_turns([EVEN, *dict.fromkeys(timed.values())], splits.get, task.rounds)
    turns = {EVEN: taken[EVEN]} | {name: taken[first] for name, first in timed.items()}
    quickest = min(splits, key=lambda name: median(turns[name]))
    best = climb(splits[quickest], crew.race, crew.busy, task.trials)
    judged = ["ours", "best", *([EVEN] if task.is_beside_even else [])]
    pairs = crew.in_turns(judged, {"ours": splits["ours"], "best": best}.get, task.num_pairs)
    return Found(
        splits=splits | {"best": best},
        turns=turns,
        pairs=list(zip(pairs["ours"], pairs["best"], strict=True)),
        evens_s=pairs.get(EVEN, []),
        learning_steps=learning_steps,
        rebalances=rebalances,
        predicted_s=predicted_s,
        drift=crew.drift() if task.drift_steps else None,
    )


def _first_alike(splits: Mapping[str, Shares]) -> dict[str, str]:
    """For each contestant the first one with the same split, which takes its turns for both."""
    return {name: next(one for one in splits if splits[one] == split) for name, split in splits.items()}


def main() -> None:
    task, out = read_task(Path(sys.argv[1])), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    found = compete(task)
    if dist.get_rank() == 0:
        write(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
