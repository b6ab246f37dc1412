"""Peak memory by device: what a plan predicts beside what its run holds, in bytes of live tensors.

Random plans of every kind (bench/memory_plans.py) run on gloo ranks; each rank's peak is counted at the
dispatcher. The prediction is the price's, from a profile whose bytes were measured here (bench/
memory_profile.py), without the reserve of the device type (context and libraries, which hold no tensors). An
error above 0 says that more was predicted than was there. With ``--out DIR`` a full run keeps each plan in
DIR/memory (bench/memory_records.py) and goes on where another was cut short.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import torch
import torch.distributed as dist

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.measure.live import peak_of
from arachne_runtime.measure.recorder import Silence
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.placement import holding, places
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile
from arachne_runtime.testing import run_ranks
from planner.cost.price import peaks_of
from planner.cost.seats import seats_of
from planner.request import Request

from .memory_plans import KINDS, TENSOR_RANKS, WORKLOADS, Kind
from .memory_profile import SAMPLES, measured_profile
from .memory_records import Records
from .report import Options, Result, at_least, at_most, run_bench

STEPS = (3, 5)
"""Those that are weighed. Steps 0, 1, 2, 4, 8, ... also look for what a plan could change (engine.watch), on
two rows at a time; where a stage takes one or two rows anyway that is told beside the others, not judged."""
CLUSTER = Cluster(
    node=tuple(NodeEntry(name=name, device="cpu", gpus=TENSOR_RANKS) for name in "ab"),
    network=Network(inter_GBps=1.0),
)


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


def peak_on_rank(workload: str, plan: Plan) -> int:
    """Peak bytes of this rank under a plan."""
    trained, weigher = WORKLOADS[workload], Weigher()
    engine = Engine(
        plan,
        ModelParts.of(trained.model),
        Recipe(optimizer=trained.optimizer, loss=trained.loss, inputs=trained.inputs, clip_norm=1.0),
        recorder=weigher,
    )
    torch.manual_seed(0)  # all ranks have one batch
    batch = trained.batch(plan.global_batch)
    for _ in range(max(STEPS) + 1):
        engine.step(batch)
    dist.barrier()
    engine.close()
    return max(weigher.peaks[step] for step in STEPS)


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
    """Every kind that can run here."""
    for kind in KINDS:
        if not kind.is_available:
            print(f"{kind.name}: left out, since {kind.needs} is not installed", flush=True)
            continue
        records = records_of(kind, options)
        found = list(compared(kind.plans(quick=options.quick), kind.workload, records=records))
        for c in sorted(found, key=lambda c: c.error):
            print(told(c), flush=True)
        yield from of_kind(kind, [c.error for c in found], records.commits)


def records_of(kind: Kind, options: Options) -> Records:
    """None of a quick run, which ends anyway."""
    kept = options.out and not options.quick
    return Records.of(options.out / "memory" / f"{kind.name}.jsonl" if kept and options.out else None)


def of_kind(kind: Kind, errors: Sequence[float], commits: Sequence[str]) -> Iterator[Result]:
    """Lowest, highest and median error."""
    detail = {"ranks": len(errors), "commits": list(commits)}
    yield at_least(f"{kind.name}-lowest", min(errors), "of 1", bound=0.0, **detail)
    yield at_most(f"{kind.name}-highest", max(errors), "of 1", bound=kind.highest)
    yield at_most(f"{kind.name}-median", median(errors), "of 1", bound=kind.highest)


def compared(
    plans: Sequence[Plan],
    workload: str = "gpt",
    samples: Sequence[int] = SAMPLES,
    records: Records | None = None,
) -> Iterator[Comparison]:
    """Every rank of every plan; of those that ``records`` have no more is run."""
    records = records or Records()
    degrees = {len(r.devices) for plan in plans for p in plan.pipelines for s in p.stages for r in s.replicas}
    profiled = lru_cache(1)(lambda: measured_profile(workload, degrees, samples))
    for plan in plans:
        found = records.find(plan)
        if found is None:
            expected = predicted(plan, *profiled())
            by_rank = {place.rank: expected[place.device] for place in places(plan)}
            measured = run_ranks(len(by_rank), peak_on_rank, workload, plan, timeout_s=3600)
            found = records.add(plan, [by_rank[rank] for rank in range(len(by_rank))], measured)
        both = zip(found.predicted_bytes, found.measured_bytes, strict=True)
        for rank, (predicted_bytes, measured_bytes) in enumerate(both):
            yield Comparison(
                plan=plan, rank=rank, predicted_bytes=predicted_bytes, measured_bytes=measured_bytes
            )


def told(c: Comparison) -> str:
    """Of one rank: error, bytes, and what it does."""
    mine = [place for place in places(c.plan) if place.rank == c.rank]
    parts = []
    for place in mine:
        pipeline, stage, replica = holding(c.plan, place)
        marks = {
            "recomputed": stage.recompute,
            f"TP {len(replica.devices)}": len(replica.devices) > 1,
            f"ZeRO-{stage.zero}": stage.zero,
            f"EP {stage.expert_parallel} x ETP {stage.expert_tensor}": stage.expert_parallel
            * stage.expert_tensor
            > 1,
        }
        parts.append(
            f"blocks {stage.layers[0]}:{stage.layers[1]} as stage {place.stage} of {len(pipeline.stages)}, "
            f"{replica.share} of {pipeline.micro_batch} rows, {len(stage.replicas)} wide"
            + "".join(f", {word}" for word, holds in marks.items() if holds)
        )
    pipeline = c.plan.pipelines[mine[0].pipeline]
    return (
        f"{c.error:+7.1%}  {c.predicted_bytes / 1e6:6.2f} of {c.measured_bytes / 1e6:6.2f} MB  "
        f"{c.plan.schedule}, {pipeline.micro_batches} micro-batches, {len(c.plan.pipelines)} pipelines, "
        + "; ".join(parts)
    )


if __name__ == "__main__":
    raise SystemExit(run_bench("memory", measure))
