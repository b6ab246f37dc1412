"""Records of runs that never were: each rank plays the timeline of a price, with noise and stalls."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.placement import Place, places
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.profile import Profile
from arachne_runtime.plan.records import Record, RecordKind
from planner.cost import Infeasible, price
from planner.cost.estimate import Span
from planner.feedback import Run
from planner.feedback.run import spent
from planner.request import Request

Factor = Callable[[int, int, Span], float]
"""(rank, step, piece) → times its seconds."""


def request_of(plan: Plan, cluster: Cluster, model: ModelSpec, profile: Profile) -> Request:
    return Request(
        cluster=cluster,
        model=model,
        profile=profile,
        global_batch=plan.global_batch,
        schedules=(plan.schedule,),
    )


def priced_s(plan: Plan, cluster: Cluster, model: ModelSpec, profile: Profile) -> float:
    found = price(plan, request_of(plan, cluster, model, profile))
    assert not isinstance(found, Infeasible)
    return found.iteration_s


def run_of(
    plan: Plan,
    cluster: Cluster,
    model: ModelSpec,
    truth: Profile,
    *,
    name: str = "run",
    steps: int = 8,
    noise: float = 0.01,
    seed: int = 0,
    times: Factor = lambda rank, step, span: 1.0,
) -> Run:
    """A run on devices as fast as ``truth`` says; ``noise`` is the deviation of every piece's log."""
    found = price(plan, request_of(plan, cluster, model, truth))
    assert not isinstance(found, Infeasible)
    generator = np.random.default_rng(seed)
    records: list[Record] = []
    for step in range(steps):
        told: dict[int, list[Record]] = {}
        rest_s: dict[int, float] = {}
        for place in places(plan):
            spans = found.timeline[place.device]
            factors = [times(place.rank, step, s) * math.exp(generator.normal(0, noise)) for s in spans]
            told[place.rank] = _pieces(plan, place, step, spans, factors)
            rest_s[place.rank] = _rest_s(spans, found.iteration_s)
        whole_s = max(rest_s[rank] + sum(map(spent, pieces)) for rank, pieces in told.items())
        for rank, pieces in told.items():
            records += [*pieces, _record(plan, rank, step, RecordKind.STEP, "step", compute_s=whole_s)]
    return Run(name=name, plan=plan, cluster=cluster, model=model, records=tuple(records))


def _pieces(
    plan: Plan, place: Place, step: int, spans: Sequence[Span], factors: Sequence[float]
) -> list[Record]:
    """A rank waits from the end of a piece to the start of the next, but not before the optimizer."""
    share = plan.pipelines[place.pipeline].stages[place.stage].replicas[place.replica].share
    records, last_s = [], 0.0
    for span, factor in zip(spans, factors, strict=True):
        seconds, gap_s = (span.end_s - span.start_s) * factor, max(0.0, span.start_s - last_s)
        waits_s = 0.0 if span.kind is RecordKind.UPDATE else gap_s
        last_s = span.end_s
        is_sum, is_action = span.kind is RecordKind.REDUCE, span.kind is RecordKind.ACTION
        times = {"wait_s": waits_s + seconds} if is_sum else {"wait_s": waits_s, "compute_s": seconds}
        records.append(
            _record(plan, place.rank, step, span.kind, span.name, samples=share if is_action else 0, **times)
        )
    return records


def _rest_s(spans: Sequence[Span], iteration_s: float) -> float:
    """Between the last action or sum and the optimizer, and behind it."""
    last_s = max((s.end_s for s in spans if s.kind is not RecordKind.UPDATE), default=0.0)
    return iteration_s - last_s - sum(s.end_s - s.start_s for s in spans if s.kind is RecordKind.UPDATE)


def _record(
    plan: Plan, rank: int, step: int, kind: RecordKind, name: str, samples: int = 0, **times: float
) -> Record:
    return Record(
        kind=kind, name=name, rank=rank, step=step, plan=digest(plan), start_s=0.0, samples=samples, **times
    )


def write_run(folder: Path, run: Run) -> None:
    """As the ranks of a run do; appended to what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    by_rank: dict[int, list[bytes]] = {}
    for record in run.records:
        by_rank.setdefault(record.rank, []).append(msgspec.json.encode(record) + b"\n")
    for rank, lines in by_rank.items():
        with (folder / f"rank-{rank}.jsonl").open("ab") as file:
            file.writelines(lines)


def plan_of(
    stages: Sequence[tuple[tuple[int, int], Mapping[str, int]]], micro_batches: int, model: ModelSpec
) -> Plan:
    """One pipeline from its stages: blocks, and share by devices (``a:0 a:1`` is a tensor-parallel group)."""
    made = tuple(
        Stage(
            layers=layers,
            replicas=tuple(Replica(devices=tuple(d.split()), share=n) for d, n in shares.items()),
        )
        for layers, shares in stages
    )
    rows = made[0].shares
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=sum(rows), stages=made)
    return Plan(
        model=model.name,
        global_batch=micro_batches * sum(rows),
        sequence=model.sequence,
        pipelines=(pipeline,),
    )
