"""Peak memory by device: what a plan predicts beside what its run holds, in bytes of live tensors.

Random plans (schedules, recomputation, shares, unlike pipelines) of the example's GPT run on gloo ranks; each
rank's peak is counted at the dispatcher. The prediction is the price's, from a
profile whose bytes were measured here, without the reserve of the device type (context and libraries, which
hold no tensors). An error above 0 says that more was predicted than was there.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

import torch
import torch.distributed as dist

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.measure.blocks import measure_blocks
from arachne_runtime.measure.live import peak_of
from arachne_runtime.measure.recorder import Silence
from arachne_runtime.measure.timing import Effort
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.placement import holding, places
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.profile import Profile
from arachne_runtime.testing import run_ranks
from examples.gpt import GPT, Config, adamw, next_byte_loss, workload
from planner.cost.price import peaks_of
from planner.cost.seats import seats_of
from planner.request import Request

from .report import Options, Result, at_least, at_most, run_bench

BLOCKS, MAX_RANKS, MAX_SHARE = Config.layers + 2, 5, 12
STEPS = (3, 5)
"""Those that are weighed. Steps 0, 1, 2, 4, 8, ... also look for what a plan could change (engine.watch), on
two rows at a time; where a stage takes one or two rows anyway that is told beside the others, not judged."""
CLUSTER = Cluster(
    node=tuple(NodeEntry(name=name, device="cpu", gpus=3) for name in "ab"), network=Network(inter_GBps=1.0)
)
LEAST_EFFORT = Effort(batch_s=1e-6, rounds=1)
"""Only bytes are wanted of the profile."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One rank of one plan."""

    plan: Plan
    rank: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the measured peak."""
        return self.predicted_bytes / self.measured_bytes - 1


def measured_profile() -> tuple[ModelSpec, Profile]:
    """Bytes of the example's blocks for 1 to MAX_SHARE samples."""
    samples = (1, 2, 3, 4, 6, 8, MAX_SHARE)
    found = measure_blocks(
        workload, device=torch.device("cpu"), device_type="cpu", samples=samples, effort=LEAST_EFFORT
    )
    model = found.model
    return model, Profile(
        model=model.name, sequence=model.sequence, timings=found.timings, updates=found.updates
    )


def predicted(plan: Plan, model: ModelSpec, profile: Profile) -> dict[str, int]:
    """Bytes by device, the reserve of the type taken off."""
    request = Request(
        cluster=CLUSTER,
        model=model,
        profile=profile,
        global_batch=plan.global_batch,
        schedules=(plan.schedule,),
    )
    seats = seats_of(plan, request.tables)
    reserves = {
        device: seat.node.device.reserve_bytes
        for pipeline in seats for stage in pipeline for seat in stage for device in seat.replica.devices
    }  # fmt: skip
    peaks, _ = peaks_of(plan, seats, request.tables)
    return {device: peak - reserves[device] for device, peak in peaks.items()}


def peaks_on_rank(plans: Sequence[Plan]) -> list[int]:
    """Peak bytes of this rank under each plan."""
    found = []
    for plan in plans:
        engine = Engine(
            plan,
            ModelParts.of(lambda: GPT(Config())),
            Recipe(optimizer=adamw, loss=next_byte_loss, clip_norm=1.0),
            recorder=Weigher(),
        )
        batch = workload.batch(plan.global_batch)
        for _ in range(max(STEPS) + 1):
            engine.step(batch)
        found.append(max(engine._records.peaks[step] for step in STEPS))
        dist.barrier()
        engine.close()
    return found


class Weigher(Silence):
    """Finds the peak of every step and records nothing else."""

    def __init__(self):
        self.peaks = []

    @contextmanager
    def step(self, number, *, samples, held):
        with peak_of(torch.device("cpu"), held) as peak:
            yield
        self.peaks.append(peak.bytes)


def measure(options: Options) -> Iterator[Result]:
    """Random plans, those of one number of ranks in one go."""
    count, source = 8 if options.quick else 40, random.Random(2026)
    plans = [random_plan(source) for _ in range(count)]
    found = list(compared(plans))
    for c in sorted(found, key=lambda c: c.error):
        print(
            f"{c.error:+7.1%}  {c.predicted_bytes / 1e6:6.2f} of {c.measured_bytes / 1e6:6.2f} MB  {_told(c)}"
        )
    errors = [c.error for c in found]
    yield at_least("memory-lowest", min(errors), "of 1", bound=0.0)
    yield at_most("memory-highest", max(errors), "of 1", bound=0.10)
    yield at_most("memory-median", median(errors), "of 1", bound=0.10)


def compared(plans: Sequence[Plan]) -> Iterator[Comparison]:
    """Every rank of every plan."""
    model, profile = measured_profile()
    by_size = sorted(plans, key=lambda plan: len(plan.devices))
    for num_ranks, group in groupby(by_size, key=lambda plan: len(plan.devices)):
        alike = list(group)
        ranks = run_ranks(num_ranks, peaks_on_rank, alike, timeout_s=600)
        for index, plan in enumerate(alike):
            expected = predicted(plan, model, profile)
            for place in places(plan):
                yield Comparison(
                    plan=plan,
                    rank=place.rank,
                    predicted_bytes=expected[place.device],
                    measured_bytes=ranks[place.rank][index],
                )


def _told(c: Comparison) -> str:
    place = places(c.plan)[c.rank]
    pipeline, stage, replica = holding(c.plan, place)
    first, stop = stage.layers
    recomputed = ", recomputed" if stage.recompute else ""
    return (
        f"{c.plan.schedule}, blocks {first}:{stop} as stage {place.stage} of {len(pipeline.stages)}, "
        f"{replica.share} of {pipeline.micro_batch} rows, {len(stage.replicas)} wide, "
        f"{pipeline.micro_batches} micro-batches, {len(c.plan.pipelines)} pipelines{recomputed}"
    )


def random_plan(source: random.Random) -> Plan:
    """One or two unlike pipelines on one to five devices."""
    devices = list(CLUSTER.devices)
    source.shuffle(devices)
    used = devices[: source.randint(1, MAX_RANKS)]
    pipelines = [
        _pipeline(source, used[start:stop])
        for start, stop in pairwise(_cuts(source, len(used), source.randint(1, min(2, len(used)))))
    ]
    return Plan(
        model=workload.name,
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=workload.sequence,
        schedule=source.choice((ScheduleKind.ONE_F_ONE_B, ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)),
        pipelines=tuple(pipelines),
    )


def _pipeline(source: random.Random, devices: Sequence[str]) -> Pipeline:
    depth = source.randint(1, len(devices))
    spans = list(pairwise(_cuts(source, len(devices), depth)))
    micro_batch = source.randint(max(stop - start for start, stop in spans), MAX_SHARE)
    stages = []
    for (start, stop), layers in zip(spans, pairwise(_cuts(source, BLOCKS, depth)), strict=True):
        shares = [b - a for a, b in pairwise(_cuts(source, micro_batch, stop - start))]
        replicas = [
            Replica(devices=(device,), share=share)
            for device, share in zip(devices[start:stop], shares, strict=True)
        ]
        stages.append(Stage(layers=layers, recompute=source.random() < 0.3, replicas=tuple(replicas)))
    return Pipeline(micro_batches=source.randint(1, 5), micro_batch=micro_batch, stages=tuple(stages))


def _cuts(source: random.Random, total: int, parts: int) -> list[int]:
    """Borders of ``parts`` runs of at least one out of ``total``."""
    return [0, *sorted(source.sample(range(1, total), parts - 1)), total]


if __name__ == "__main__":
    raise SystemExit(run_bench("memory", measure))
