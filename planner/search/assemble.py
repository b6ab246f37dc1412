"""From columns to plans: counts of micro-batches that make the global batch exactly, shares, devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.shares import largest_remainder

from ..cost.experts import expert_tilings
from .batch import StagePlan, Templates, pipeline_of
from .columns import Columns, Completion
from .place import PipelineSeats, StageSeats, place
from .template import Template

FAIR_PART = 8
"""Beside a larger odd micro-batch the others' count is tried up to an eighth and one above the even count; a
guess."""

MOST_TIMES = 2
"""The larger odd micro-batch is tried up to so many times the others', and one sample more; a guess."""


@dataclass(frozen=True, slots=True)
class Part:
    """Alike pipelines of a plan, and what each takes: (micro-batches, micro-batch)."""

    stages: tuple[StagePlan, ...]
    bounds: tuple[int, ...]
    again: tuple[bool, ...]
    takes: tuple[tuple[int, int], ...]


def part_of(columns: Columns, k: int, takes: Sequence[tuple[int, int]]) -> Part:
    """Column ``k`` for so many pipelines as there are ``takes``."""
    stages = columns.templates.stages(k)
    depth = len(stages)
    return Part(
        stages,
        tuple(int(x) for x in columns.bounds[k, : depth + 1]),
        tuple(bool(x) for x in columns.again[k, :depth]),
        tuple(takes),
    )


def alike(columns: Columns, k: int, global_batch: int) -> Part | None:
    """All copies of column ``k``, which share the whole global batch evenly; None where they cannot."""
    t = columns.templates
    takes = even_takes(int(t.copies[k]), int(t.micro_batch[k]), global_batch, int(t.width[k].max()))
    return part_of(columns, k, takes) if takes else None


def are_whole(templates: Templates, global_batch: int) -> NDArray[np.bool_]:
    """``[K]``: whether all copies of each can share the global batch."""
    t = templates
    found = t.copies * t.micro_batch <= global_batch
    widest = t.width.max(axis=1, initial=1)
    for k in np.nonzero(found & (global_batch % t.micro_batch > 0))[0]:
        takes = even_takes(int(t.copies[k]), int(t.micro_batch[k]), global_batch, int(widest[k]))
        found[k] = takes is not None
    return found


Takes = tuple[tuple[int, int], ...]
"""(Micro-batches, micro-batch) of each pipeline."""


@lru_cache(maxsize=4096)
def even_takes(copies: int, size: int, samples: int, least: int) -> Takes | None:
    """What each pipeline takes, ``samples`` together, as even as they go.

    Where the size does not divide the samples, the last pipeline has another size, at least ``least``: that
    of a count near the others whose size is largest, or else the larger one with which all end soonest. None
    where there is none.
    """
    count, rest = divmod(samples, size)
    if rest == 0:
        return _evenly(copies, count, size) if count >= copies else None
    found = max(_smaller(copies, size, count, rest, least), default=None)
    if found is not None:
        _, _, full, odd = found
        return (*_evenly(copies - 1, count - full, size), odd)
    larger = min(_larger(copies, size, samples, least), default=None)
    return (*_evenly(copies - 1, larger[1], size), larger[2]) if larger else None


def _evenly(copies: int, count: int, size: int) -> Takes:
    return tuple((n, size) for n in largest_remainder(count, [1] * copies)) if copies else ()


def _smaller(
    copies: int, size: int, count: int, rest: int, least: int
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """(Its size, closeness to even, full micro-batches that it replaces, what it takes) of the odd one."""
    fair = count // copies
    choices = [count] if copies == 1 else range(max(0, fair - 2), min(count - copies + 1, fair + 2) + 1)
    for full in choices:
        samples = full * size + rest
        divisors = [b for b in range(least, size + 1) if samples % b == 0]
        if divisors:
            yield divisors[-1], -abs(full - fair), full, (samples // divisors[-1], divisors[-1])


def _larger(copies: int, size: int, samples: int, least: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(Samples of the widest stage where they take longest, the others' count, what the odd one takes)."""
    others = copies - 1
    fair = max(1, samples // (copies * size))
    choices = [0] if others == 0 else range(others * fair, others * (fair + 1 + fair // FAIR_PART) + 1)
    for count in choices:
        rest = samples - count * size
        for odd in range(size + 1, min(MOST_TIMES * size + 1, rest) + 1):
            if rest % odd == 0:
                longest = -(-count // others) * -(-size // least) if others else 0
                yield max(longest, rest // odd * -(-odd // least)), count, (rest // odd, odd)


def plan_of(completion: Completion, parts: Sequence[Part], *, by_stage: bool) -> Plan | None:
    """The parts on devices; None where the nodes cannot hold them or a stage does not fit."""
    template = Template(tuple(pipeline_of(part.stages) for part in parts for _ in part.takes))
    placement = place(template, completion.supply, by_stage=by_stage)
    if placement is None:
        return None
    takes = [(part, take) for part in parts for take in part.takes]
    pipelines = []
    for seats, (part, take) in zip(placement.pipelines, takes, strict=True):
        pipeline = _pipeline(completion, part, take, seats)
        if pipeline is None:
            return None
        pipelines.append(pipeline)
    request = completion.request
    return Plan(
        model=request.model.name,
        global_batch=request.global_batch,
        sequence=request.model.sequence,
        schedule=completion.kind,
        pipelines=tuple(pipelines),
    )


def _tiling(completion: Completion, tile: int, seated: StageSeats) -> tuple[int, int]:
    """(EP, ETP) of a tile: as much EP as the experts divide into, ETP within nodes."""
    if tile == 1:
        return 1, 1
    experts = max(block.experts for block in completion.request.model.blocks)
    homes = [node_of(device) for seat in seated for device in seat]
    options = list(expert_tilings(homes, experts))
    exact = [option for option in options if option[0] * option[1] == tile]
    larger = [option for option in options if option[0] * option[1] > tile]
    return max(exact) if exact else min(larger, default=(1, 1), key=lambda o: (o[0] * o[1], -o[0]))


def _pipeline(
    completion: Completion, part: Part, take: tuple[int, int], seats: PipelineSeats
) -> Pipeline | None:
    count, size = take
    stages = []
    for s, (stage, seated) in enumerate(zip(part.stages, seats, strict=True)):
        held = completion.in_flight(s, len(part.stages), count)
        start, stop = part.bounds[s], part.bounds[s + 1]
        option = completion.rows.option(stage, size, start, stop, held)
        if option is None:
            return None
        shares = largest_remainder(size, [1] * len(seated))
        parallel, tensor = _tiling(completion, stage[3], seated)
        stages.append(
            Stage(
                layers=(start, stop),
                recompute=option.recompute,
                zero=option.zero,
                expert_parallel=parallel,
                expert_tensor=tensor,
                replicas=tuple(Replica(devices=d, share=n) for d, n in zip(seated, shares, strict=True)),
            )
        )
    return Pipeline(micro_batches=count, micro_batch=size, stages=tuple(stages))
