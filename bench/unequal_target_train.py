"""What each rank of a lab of bench.unequal_target runs: three contestants train to one loss, in turns.

All start from the same parameters and take samples in the same order. Only training counts: between turns the
first rank evaluates, on samples that nobody trains on.

``-m bench.unequal_target_train TASK RACE``
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import arachne_runtime as arachne
from arachne_runtime.batch import Balancer
from examples import gpt, shapes

from .unequal_target_records import (
    Contestant,
    Point,
    Race,
    Run,
    TargetTask,
    Workload,
    read_target_task,
    write,
)

HELD_OUT_EVERY = 16
"""Of the samples, one in so many is for evaluation only."""
NUM_HELD_OUT = 256
FIRST_STEPS = 2
"""Of the first turn, when it is not known how many fill one."""
SEQUENCE = 32
NUM_PICTURES = 4096
NORM_GROUPS = 4


class Even(Balancer):
    """Learns as ever, but shares evenly."""

    def shares(self, global_batch: int) -> tuple[int, ...]:
        each, left = divmod(global_batch, len(self.caps))
        return tuple(each + (rank < left) for rank in range(len(self.caps)))


def samples_of(workload: Workload) -> Dataset[Any]:
    """All of them."""
    if workload is Workload.TEXT:
        return gpt.StandardLibrary(SEQUENCE)
    pictures = shapes.Shapes(NUM_PICTURES)
    return TensorDataset(*default_collate([pictures[i] for i in range(NUM_PICTURES)]))


def parted(samples: Dataset[Any]) -> tuple[Dataset[Any], Any]:
    """Samples to train on, and a batch to evaluate on."""
    indices = range(len(samples))  # type: ignore[arg-type]
    held = indices[::HELD_OUT_EVERY]
    chosen = held[:: max(1, len(held) // NUM_HELD_OUT)][:NUM_HELD_OUT]
    trained = [i for i in indices if i % HELD_OUT_EVERY]
    return Subset(samples, trained), default_collate([samples[i] for i in chosen])


def model_of(task: TargetTask) -> nn.Module:
    """With the first values of the parameters that follow from the seed."""
    torch.manual_seed(task.seed)
    if task.workload is Workload.TEXT:
        return gpt.GPT(gpt.Config(sequence=SEQUENCE, width=task.width, heads=4, layers=2))
    return convolutions(task.width)


def optimizer_of(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Its learning rate was chosen for the base batches of the cases."""
    if workload is Workload.TEXT:
        return torch.optim.AdamW(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def convolutions(width: int) -> nn.Module:
    """(B, 3, H, W) → (B, K): four that halve the picture, with norms of each sample; then the mean."""
    sizes = [3, width, 2 * width, 4 * width, 4 * width]
    parts: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        parts += [
            nn.Conv2d(inner, outer, 3, stride=2, padding=1),
            nn.GroupNorm(NORM_GROUPS, outer),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], len(shapes.KINDS))
    )


@dataclass
class Racer:
    """One contestant."""

    loader: arachne.HeteroLoader
    adapts: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    held_out: Any
    points: list[Point] = field(default_factory=list)
    next_steps: int = FIRST_STEPS
    steps: int = 0
    batches: Iterator[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.batches = _endless(self.loader)
        self._note(0.0, float(self.steps))

    @classmethod
    def of(cls, contestant: Contestant, task: TargetTask, trained: Dataset[Any], held_out: Any) -> "Racer":
        """At its start."""
        num_ranks = dist.get_world_size()
        sharing = (Even if contestant is Contestant.EVEN else Balancer)(num_replicas=num_ranks)
        adapts = contestant is Contestant.ADAPTIVE
        loader = arachne.HeteroLoader(
            trained,
            task.base_batch,
            seed=task.seed,
            drop_last=True,
            sharing=sharing,
            adaptive=arachne.AdaptiveBatch() if adapts else None,
        )
        model = arachne.HeteroDDP(model_of(task), loader=loader)
        return cls(loader, adapts, model, optimizer_of(task.workload, model), held_out)

    def turn(self, turn_s: float) -> None:
        """Train for about so long, then evaluate."""
        dist.barrier()
        self.loader.link.restart_clocks()  # else the wait for this turn were read as computing
        start = time.perf_counter()
        for _ in range(self.next_steps):
            self._step()
        dist.barrier()
        (taken_s,) = first_ranks([time.perf_counter() - start])
        self.steps += self.next_steps
        self.next_steps = max(1, round(self.next_steps * turn_s / taken_s))
        self._note(self.points[-1].seconds + taken_s, self._progress())

    def _step(self) -> None:
        inputs, targets = next(self.batches)
        with self.loader.step(self.optimizer):
            loss = mean_loss(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def _progress(self) -> float:
        return self.loader.adaptation.state.progress_steps if self.adapts else float(self.steps)

    def _note(self, seconds: float, progress: float) -> None:
        (loss,) = first_ranks([self._held_out_loss() if dist.get_rank() == 0 else 0.0])
        self.points.append(
            Point(
                seconds=seconds,
                steps=self.steps,
                progress=progress,
                batch=self.loader.global_batch,
                loss=loss,
            )
        )

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        inputs, targets = self.held_out
        return mean_loss(self.model(inputs), targets).item()

    def is_done(self, task: TargetTask) -> bool:
        """Whether it has been at the target twice, so that no lucky evaluation counts, or is out."""
        last = self.points[-2:]
        return last[-1].seconds >= task.most_s or all(point.loss <= task.target for point in last)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes: (..., C), (...)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def first_ranks(numbers: Sequence[float]) -> list[float]:
    """What the first rank has measured, on all."""
    values = torch.tensor(numbers, dtype=torch.float64)
    dist.broadcast(values, src=0)
    return values.tolist()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def race(task: TargetTask) -> Race:
    """All contestants take turns until they are done, every other time the other way round."""
    samples = parted(samples_of(task.workload))
    racers = {contestant: Racer.of(contestant, task, *samples) for contestant in Contestant}
    forward = True
    while waiting := [racer for racer in racers.values() if not racer.is_done(task)]:
        for racer in waiting if forward else reversed(waiting):
            racer.turn(task.turn_s)
        forward = not forward
    return {contestant: _run_of(racer) for contestant, racer in racers.items()}


def _run_of(racer: Racer) -> Run:
    decisions = racer.loader.adaptation.decisions if racer.adapts else ()
    return Run(points=racer.points, decisions=[str(one) for one in decisions])


def main() -> None:
    task, out = read_target_task(Path(sys.argv[1])), Path(sys.argv[2])
    dist.init_process_group("gloo")
    found = race(task)
    if dist.get_rank() == 0:
        write(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
