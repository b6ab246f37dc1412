"""Random plans of every schedule: unlike pipelines, unequal shares, recomputation, short batches."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage

from .cases import SEQUENCE, Case
from .exactness_frame import Kind, random_settings

BLOCKS, MAX_RANKS = 6, 6
SINGLE_SHARE = 4
"""One plan in so many is trained in float32."""


def random_case(schedules: Sequence[ScheduleKind], source: random.Random, index: int) -> Case:
    """Settings of every sort; the optimizer alternates."""
    plan = random_plan(source, source.choice(schedules))
    drawn = random_settings(source, plan, index, single_share=SINGLE_SHARE, blocking=0.2, scheduled=0.3)
    if drawn["dtype"] is torch.float32:  # else all of these had the same optimizer
        drawn["adam"] = index // SINGLE_SHARE % 2 == 0
    return Case(**drawn)


def random_plan(source: random.Random, schedule: ScheduleKind) -> Plan:
    """One to three unlike pipelines on two to six devices."""
    devices = [f"{node}:{index}" for node in "ab" for index in range(3)]
    source.shuffle(devices)
    used = devices[: source.randint(2, MAX_RANKS)]
    cuts = random_cuts(source, len(used), source.randint(1, min(3, len(used))))
    pipelines = [_pipeline(source, used[start:stop], schedule) for start, stop in pairwise(cuts)]
    return Plan(
        model="tiny",
        global_batch=sum(p.micro_batches * p.micro_batch for p in pipelines),
        sequence=SEQUENCE,
        schedule=schedule,
        pipelines=tuple(pipelines),
    )


def random_cuts(source: random.Random, total: int, parts: int) -> list[int]:
    """Borders of ``parts`` runs of at least one out of ``total``."""
    return [0, *sorted(source.sample(range(1, total), parts - 1)), total]


def _pipeline(source: random.Random, devices: Sequence[str], schedule: ScheduleKind) -> Pipeline:
    """Interleaved, each set of devices holds one to three stages."""
    num_rows = source.randint(1, len(devices))
    spans = list(pairwise(random_cuts(source, len(devices), num_rows)))
    micro_batch = max(stop - start for start, stop in spans) + source.randint(0, 3)
    rows = []
    for start, stop in spans:
        shares = [b - a for a, b in pairwise(random_cuts(source, micro_batch, stop - start))]
        mine = zip(devices[start:stop], shares, strict=True)
        rows.append(tuple(Replica(devices=(device,), share=share) for device, share in mine))
    most = min(3, BLOCKS // num_rows) if schedule is ScheduleKind.INTERLEAVED else 1
    rows *= source.randint(1, most)
    stages = tuple(
        Stage(layers=layers, recompute=source.random() < 0.3, replicas=replicas)
        for layers, replicas in zip(pairwise(random_cuts(source, BLOCKS, len(rows))), rows, strict=True)
    )
    return Pipeline(micro_batches=source.randint(1, 5), micro_batch=micro_batch, stages=stages)


PLAIN = Kind(
    name="plain",
    draw=partial(random_case, (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)),
    full=48,
    quick=4,
)
INTERLEAVED = Kind(
    name="interleaved", draw=partial(random_case, (ScheduleKind.INTERLEAVED,)), full=32, quick=4
)
ZERO_BUBBLE = Kind(
    name="zero-bubble", draw=partial(random_case, (ScheduleKind.ZERO_BUBBLE,)), full=32, quick=4
)
