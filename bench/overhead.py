"""What the engine costs beside its rivals on the same even plan: torch's own 1F1B on 4 ranks, DDP on 2.

And what its recorder costs: the part of a step's CPU time that is spent in it.

Both sides train the same blocks on the same rows in the same processes, in alternating pairs. A step is
forward, backward, (DDP: reduction) and AdamW. Ours also computes the gradient norm and sends the commit word.
In steps 0, 1, 2, 4, 8, ... it runs blocks again to find what would depend on the plan (engine.watch): their
pairs are told on their own and not judged, as a training of some length is not made of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.watch import is_watched
from arachne_runtime.measure.recorder import Recorder
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

from .overhead_phases import phases, table
from .report import Options, Result, at_most, interval, run_bench

BOUND = 1.03
WARM_UP = 2
"""Pairs that are thrown away: buffers, threads, first-call imports."""


@dataclass(frozen=True)
class Size:
    """A stack of transformer blocks and its batch."""

    width: int
    sequence: int = 64
    heads: int = 4
    blocks: int = 8
    rows: int = 4
    """Of a micro-batch, or of a replica."""
    micro_batches: int = 8


class Block(nn.Module):
    """Causal attention and an MLP, with residuals."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, S, D = x.shape
        q, k, v = self.mix(self.norm1(x)).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model(size: Size) -> nn.Sequential:
    return nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.blocks)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def batch(size: Size, num_rows: int):
    random = torch.Generator().manual_seed(1)
    shape = (num_rows, size.sequence, size.width)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def ours(plan: Plan, size: Size, recorder: Recorder | None = None) -> Engine:
    return Engine(
        plan,
        ModelParts.of(lambda: model(size)),
        Recipe(optimizer=adamw, loss=lambda output, batch: F.mse_loss(output, batch[1])),
        recorder=recorder,
    )


def pipeline_plan(size: Size, depth: int) -> Plan:
    """A stage a rank, all alike."""
    per_stage = size.blocks // depth
    stages = tuple(
        Stage(
            layers=(i * per_stage, (i + 1) * per_stage),
            replicas=(Replica(devices=(f"n:{i}",), share=size.rows),),
        )
        for i in range(depth)
    )
    pipeline = Pipeline(micro_batches=size.micro_batches, micro_batch=size.rows, stages=stages)
    rows = size.rows * size.micro_batches
    return Plan(model="stack", global_batch=rows, sequence=size.sequence, pipelines=(pipeline,))


def data_parallel_plan(size: Size, width: int) -> Plan:
    """One stage, a replica a rank, all alike."""
    replicas = tuple(Replica(devices=(f"n:{i}",), share=size.rows) for i in range(width))
    rows = size.rows * width
    pipeline = Pipeline(
        micro_batches=1, micro_batch=rows, stages=(Stage(layers=(0, size.blocks), replicas=replicas),)
    )
    return Plan(model="stack", global_batch=rows, sequence=size.sequence, pipelines=(pipeline,))


def pipeline_pairs(size: Size, pairs: int):
    """On 4 ranks: one stage each, the same number of blocks."""
    rank, depth = dist.get_rank(), dist.get_world_size()
    plan, per_stage = pipeline_plan(size, depth), size.blocks // depth
    engine, (inputs, targets) = ours(plan, size), batch(size, plan.global_batch)

    blocks = model(size)[rank * per_stage : (rank + 1) * per_stage]
    optimizer = adamw(blocks.parameters())
    stage = PipelineStage(blocks, rank, depth, torch.device("cpu"))
    schedule = Schedule1F1B(stage, size.micro_batches, loss_fn=F.mse_loss)

    def theirs() -> None:
        optimizer.zero_grad()
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets} if rank == depth - 1 else {}))
        optimizer.step()

    return measure_pairs(lambda: engine.step((inputs, targets)), theirs, pairs)


def data_parallel_pairs(size: Size, pairs: int):
    """On 2 ranks: the whole model each, half of the rows."""
    rank, plan = dist.get_rank(), data_parallel_plan(size, dist.get_world_size())
    engine, (inputs, targets) = ours(plan, size), batch(size, plan.global_batch)

    wrapped = DistributedDataParallel(model(size), gradient_as_bucket_view=True)
    optimizer = adamw(wrapped.parameters())
    mine = slice(rank * size.rows, (rank + 1) * size.rows)

    def theirs() -> None:
        optimizer.zero_grad()
        F.mse_loss(wrapped(inputs[mine]), targets[mine]).backward()
        optimizer.step()

    return measure_pairs(lambda: engine.step((inputs, targets)), theirs, pairs)


@dataclass(frozen=True)
class Pair:
    """A step of ours beside one of theirs; CPU time summed over ranks, wall of the slowest."""

    cpu: float
    wall: float
    ours_s: float
    """Wall seconds of ours."""
    watched: bool
    """Whether ours had checks to make."""


def measure_pairs(first: Callable[[], object], second: Callable[[], object], pairs: int) -> list[Pair]:
    """The pairs behind the warm-up; ``first`` is ours, of an engine that has not stepped yet."""
    found = []
    for index in range(WARM_UP + pairs):
        order = (first, second) if index % 2 == 0 else (second, first)
        times = {call: time_one(call) for call in order}
        (cpu_a, wall_a), (cpu_b, wall_b) = times[first], times[second]
        if index >= WARM_UP:
            found.append(Pair(cpu_a / cpu_b, wall_a / wall_b, wall_a, is_watched(index)))
    return found


def time_one(call: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall], dtype=torch.float64)
    dist.all_reduce(spent[:1])
    dist.all_reduce(spent[1:], op=dist.ReduceOp.MAX)
    return spent[0].item(), spent[1].item()


class TimedRecorder(Recorder):
    """Adds up its own CPU time."""

    spent_s = 0.0

    def _begin(self, step):
        self._timed(super()._begin, step)

    def mark(self):
        return self._timed(super().mark)

    def add(self, *args, **options):
        self._timed(super().add, *args, **options)

    def _end(self, *args):
        self._timed(super()._end, *args)

    def _timed(self, call, *args, **options):
        start = time.process_time()
        result = call(*args, **options)
        self.spent_s += time.process_time() - start
        return result


def recorder_shares(size: Size, steps: int):
    """On 2 ranks, a stage each: CPU time in the recorder by CPU time of the step."""
    plan = pipeline_plan(size, depth=2)
    found = []
    with (
        TemporaryDirectory() as directory,
        TimedRecorder(Path(directory), rank=dist.get_rank(), plan=plan) as recorder,
    ):
        engine = ours(plan, size, recorder)
        for _ in range(WARM_UP + steps):
            recorder.spent_s, start = 0.0, time.process_time()
            engine.step(batch(size, plan.global_batch))
            found.append(recorder.spent_s / (time.process_time() - start))
    return found[WARM_UP:]


def pipeline_phases(size: Size, steps: int) -> Counter[str]:
    """On 4 ranks, a stage each."""
    return phase_seconds(pipeline_plan(size, dist.get_world_size()), size, steps)


def data_parallel_phases(size: Size, steps: int) -> Counter[str]:
    """On 2 ranks, the whole model each."""
    return phase_seconds(data_parallel_plan(size, dist.get_world_size()), size, steps)


def phase_seconds(plan: Plan, size: Size, steps: int) -> Counter[str]:
    """CPU seconds of this rank by phase, in steps without checks."""
    found: Counter[str] = Counter()
    with phases(torch.optim.AdamW) as ledger:
        engine, given = ours(plan, size), batch(size, plan.global_batch)
        for step in range(WARM_UP + steps):
            ledger.spent.clear()
            engine.step(given)
            if step >= WARM_UP and not is_watched(step):
                found.update(ledger.spent)
    return found


def measure(options: Options) -> Iterator[Result]:
    sizes, pairs = ((Size(256, sequence=32),), 14) if options.quick else ((Size(256), Size(512)), 29)
    shares = [share for rank in run_ranks(2, recorder_shares, sizes[0], pairs // 2) for share in rank]
    at = interval(shares)
    print(f"recorder width {sizes[0].width}: {at.median:.3%} of a step's CPU time", flush=True)
    yield at_most("recorder-cpu", 100 * at.median, "% of a step", bound=1.0, low=at.low, high=at.high)
    for size in sizes:
        wide = replace(size, rows=2 * size.rows)
        for name, ranks, function, given in (
            ("pipeline", 4, pipeline_phases, size),
            ("ddp", 2, data_parallel_phases, wide),
        ):
            spent = sum(run_ranks(ranks, function, given, pairs // 3, timeout_s=900), Counter())
            print(f"{name} width {size.width}, CPU time by phase:\n{table(spent)}", flush=True)
        for name, ranks, function, given in (
            ("pipeline", 4, pipeline_pairs, size),
            ("ddp", 2, data_parallel_pairs, wide),
        ):
            found = run_ranks(ranks, function, given, pairs, timeout_s=900)[0]
            yield from judged(f"{name}-{size.width}", found)


def judged(name: str, pairs: list[Pair]) -> Iterator[Result]:
    """CPU time and wall of the pairs without checks, and a line on those with them."""
    plain = [pair for pair in pairs if not pair.watched]
    print(f"{name}: a step {interval([pair.ours_s for pair in plain]).median * 1e3:.0f} ms", flush=True)
    for kind in ("cpu", "wall"):
        values = [getattr(pair, kind) for pair in plain]
        checked = [getattr(pair, kind) for pair in pairs if pair.watched]
        at = interval(values)
        print(f"{name}: {kind} ratio {at}, in steps with checks {interval(checked).median:.3f}", flush=True)
        detail = {"low": at.low, "high": at.high, "pairs": len(values), "ratios": values, "checked": checked}
        yield at_most(f"{name}-{kind}", at.median, "ratio", bound=BOUND, **detail)


if __name__ == "__main__":
    raise SystemExit(run_bench("overhead", measure))
