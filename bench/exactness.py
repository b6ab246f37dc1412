"""Random plans against a single process: the same losses, norms and parameters after three steps.

Plans are trained in float64, by SGD and by AdamW in turn, with random settings: tied embeddings, clipping, a
loss by items, a learning-rate schedule, blocking communication, gradients summed block by block, batches that
leave remainders. Every fourth plan runs in float32.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import torch

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks

from .cases import SEQUENCE, Case, Gap, gap, train_all_by_plan, train_plainly
from .report import Options, Result, at_least, at_most, run_bench

BLOCKS, MAX_RANKS = 6, 6
DOUBLE_BOUND, SINGLE_BOUND = 1e-9, 1e-5
SINGLE_SHARE = 4
"""One plan in so many is trained in float32."""


def measure(options: Options) -> Iterator[Result]:
    count = 12 if options.quick else 60
    source = random.Random(2026)
    cases = [random_case(source, index) for index in range(count)]
    gaps = list(compare(cases))
    double = [g for case, g in gaps if case.dtype is torch.float64]
    single = [(case, g) for case, g in gaps if case.dtype is torch.float32]
    yield at_least("plans-compared", len(gaps), "plans", bound=12 if options.quick else 40)
    yield at_most("float64-loss", max(g.loss for g in double), "abs", bound=DOUBLE_BOUND)
    yield at_most("float64-norm", max(g.norm for g in double), "abs", bound=DOUBLE_BOUND)
    yield at_most("float64-gradients", max(g.gradient for g in double), "abs", bound=DOUBLE_BOUND)
    yield at_most("float64-parameters", max(g.parameter for g in double), "abs", bound=DOUBLE_BOUND)
    yield at_most("float32-loss", max(g.loss for _, g in single), "abs", bound=SINGLE_BOUND)
    yield at_most("float32-gradients", max(g.gradient for _, g in single), "abs", bound=SINGLE_BOUND)
    sgd = max(g.parameter for case, g in single if not case.adam)
    yield at_most("float32-sgd-parameters", sgd, "abs", bound=SINGLE_BOUND)


def compare(cases: Sequence[Case]) -> Iterator[tuple[Case, Gap]]:
    """Train each case both ways; the largest gap over its ranks."""
    by_size = sorted(cases, key=lambda case: len(case.plan.devices))
    for num_ranks, group in groupby(by_size, key=lambda case: len(case.plan.devices)):
        alike = list(group)
        found = run_ranks(num_ranks, train_all_by_plan, alike, timeout_s=600)
        for case, outcomes in zip(alike, zip(*found, strict=True), strict=True):
            wanted = train_plainly(case)
            gaps = [gap(outcome, wanted) for outcome in outcomes]
            fields = ("loss", "norm", "parameter", "gradient")
            yield case, Gap(**{name: max(getattr(g, name) for g in gaps) for name in fields})


def random_case(source: random.Random, index: int) -> Case:
    """Settings of every kind; the optimizer alternates."""
    single = index % SINGLE_SHARE == SINGLE_SHARE - 1
    plan = random_plan(source)
    return Case(
        plan=plan,
        tied=source.random() < 0.6,
        adam=index // SINGLE_SHARE % 2 == 0 if single else index % 2 == 0,
        dtype=torch.float32 if single else torch.float64,
        clip_norm=source.choice((None, 0.1, 100.0)),
        by_items=source.random() < 0.4,
        scheduled=source.random() < 0.3,
        rows=(*(source.randint(1, plan.global_batch) for _ in range(2)), plan.global_batch),
        blocking=source.random() < 0.2,
        in_pieces=source.random() < 0.4,
    )


def random_plan(source: random.Random) -> Plan:
    """One to three unlike pipelines on two to six devices."""
    devices = [f"{node}:{index}" for node in "ab" for index in range(3)]
    source.shuffle(devices)
    used = devices[: source.randint(2, MAX_RANKS)]
    pipelines = []
    for start, stop in pairwise(_cuts(source, len(used), source.randint(1, min(3, len(used))))):
        pipelines.append(_pipeline(source, used[start:stop]))
    return Plan(
        model="tiny",
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=SEQUENCE,
        schedule=source.choice((ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)),
        pipelines=tuple(pipelines),
    )


def _pipeline(source: random.Random, devices: Sequence[str]) -> Pipeline:
    depth = source.randint(1, len(devices))
    spans = list(pairwise(_cuts(source, len(devices), depth)))
    micro_batch = max(stop - start for start, stop in spans) + source.randint(0, 3)
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
    raise SystemExit(run_bench("exactness", measure))
