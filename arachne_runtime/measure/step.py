"""Measures what a step costs a device beside its blocks: the engine plays a model that computes nothing.

In it are reading and slicing rows, the engine's own bookkeeping, and the commit word. What a dataset does to
make a sample is the user's own and not in it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, default_collate

from ..data.batch import StepBatch, as_step_batch
from ..data.loader import LoadedRows, LoaderSettings, load_steps
from ..data.order import GlobalOrder
from ..engine import Engine, Recipe
from ..model import ModelParts
from ..model.workload import Workload
from ..plan.plan import Pipeline, Plan, Replica, Stage
from ..plan.profile import StepTiming
from ..units import Seconds
from .timing import DEFAULT_EFFORT, Effort, seconds_by_phase
from .together import Together

SPIN_S: Seconds = 0.02
"""CPU time of a repeat of the work that shows how much longer than its CPU time work takes."""
NUM_STEPS = 1000
"""Steps of an epoch: its order is drawn once in so many."""


def measure_step(
    workload: Workload,
    *,
    devices: Sequence[str],
    device: torch.device,
    device_type: str,
    samples: int,
    together: Together,
    effort: Effort = DEFAULT_EFFORT,
) -> StepTiming:
    """What a step on ``samples`` rows costs this rank's device, all ranks measuring at once.

    ``devices`` are the ranks' devices, by rank. On CUDA it is the step's wall time. On a CPU it is the
    process's CPU time, which leaves out the wait for others, times wall over CPU time of work that keeps the
    device busy (5 at a 0.2 share of a core).
    """
    stretch = 1.0
    if device.type != "cuda":
        (spun_s,) = seconds_by_phase((_spin,), device=device, together=together, effort=effort)
        stretch = max(1.0, spun_s / SPIN_S)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    engine = Engine(
        _plan(devices, samples),
        ModelParts.of(_Nothing.chain),
        Recipe(
            optimizer=workload.optimizer,
            loss=_no_loss,
            inputs=workload.inputs,
            stochastic=True,  # checks of the first steps are not what every step costs
        ),
        device=device,
    )
    batches = _batches(workload, engine, samples, samples * len(devices))
    rounds = [_seconds(engine, batches, clock, together, effort) for _ in range(effort.rounds + 1)]
    engine.close()
    return StepTiming(device=device_type, step_s=stretch * statistics.median(rounds[1:]))


def _seconds(
    engine: Engine,
    batches: Iterator[StepBatch],
    clock: Callable[[], float],
    together: Together,
    effort: Effort,
) -> Seconds:
    """Seconds of a step by ``clock``, of as many steps as fill a batch on the slowest rank."""
    began = time.perf_counter()
    engine.step(next(batches))
    steps = max(1, round(effort.batch_s / together.largest(time.perf_counter() - began)))
    before = clock()
    for _ in range(steps):
        engine.step(next(batches))
    return (clock() - before) / steps


def _spin() -> None:
    stop_at = time.process_time() + SPIN_S
    while time.process_time() < stop_at:
        pass


class _Nothing(nn.Module):
    """A block that gives what it gets."""

    @classmethod
    def chain(cls) -> nn.Sequential:
        """A model of one block."""
        return nn.Sequential(cls())

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0]


def _no_loss(output: Tensor, _: Any) -> Tensor:
    return torch.zeros((), device=output.device)


def _plan(devices: Sequence[str], samples: int) -> Plan:
    replicas = tuple(Replica(devices=(name,), share=samples) for name in devices)
    num_rows = samples * len(devices)
    pipeline = Pipeline(
        micro_batches=1, micro_batch=num_rows, stages=(Stage(layers=(0, 1), replicas=replicas),)
    )
    return Plan(model="nothing", global_batch=num_rows, sequence=1, pipelines=(pipeline,))


def _batches(workload: Workload, engine: Engine, samples: int, num_rows: int) -> Iterator[StepBatch]:
    """Global batches without end, read sample by sample where the samples can be told apart."""
    made = as_step_batch(workload.batch(samples))
    rows = _Rows(made, samples, NUM_STEPS * num_rows)
    try:
        default_collate([rows[0]])
    except TypeError:  # it holds more than tensors and numbers
        whole = made.rows(range(samples))
        return (LoadedRows(num_rows, ((needed, whole),)) for needed in cycle(engine.needed_rows(num_rows)))
    order = GlobalOrder(num_samples=len(rows), global_batch=num_rows)
    return load_steps(rows, order, range(1 << 30), engine.needed_rows, LoaderSettings())


class _Rows(Dataset[Any]):
    """The rows of a batch as samples, again and again."""

    def __init__(self, made: StepBatch, num_rows: int, length: int) -> None:
        self._made, self._num_rows, self._length = made, num_rows, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        at = index % self._num_rows
        row = self._made.rows(range(at, at + 1))
        return tree_map_only(Tensor, lambda t: t[0] if t.dim() else t, row)
