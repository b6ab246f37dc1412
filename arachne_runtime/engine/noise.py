"""The gradient noise of a step of a plan, seen between the replicas whose gradients each sum takes.

Each rank adds one number to the commit word: nothing else is sent. A parameter is counted once, by those who
contribute to its sum. What it does not do: tell the noise between micro-batches of one replica, whose
gradients autograd has added up when they are seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..batch import NoiseReading
from ..errors import UnsupportedPlanError
from ..plan.order import Reduction, Summed, reductions
from ..plan.placement import holding, places
from ..plan.plan import Plan
from ..plan.rows import micro_batch_rows, replica_rows
from .gradients import Gradients
from .recipe import Recipe

_KEPT = 8
"""Batch sizes whose groups are remembered: the full one and the last of an epoch recur."""


@dataclass(frozen=True, slots=True)
class NoiseGroups:
    """Whose samples are behind the gradients of a step of some number of rows."""

    num_rows: int
    rows: Mapping[int, int]
    """Samples by rank, over all its micro-batches."""

    @classmethod
    def of(cls, plan: Plan, num_rows: int) -> "NoiseGroups":
        """Of all ranks."""
        spans = micro_batch_rows(plan, num_rows)
        rows = {}
        for place in places(plan):
            _, stage, _ = holding(plan, place)
            parts = (replica_rows(stage, span)[place.replica] for span in spans[place.pipeline])
            rows[place.rank] = sum(map(len, parts))
        return cls(num_rows, rows)

    def contributing(self, reduction: Reduction) -> list[int]:
        """Ranks whose gradients a sum takes, each of samples of its own."""
        return [rank for rank in _contributors(reduction) if self.rows[rank]]


class NoiseWatch:
    """Reads the noise from the buffers of one rank, before and after their sums."""

    def __init__(self, plan: Plan, sums: Sequence[Reduction], gradients: Gradients, rank: int) -> None:
        self._sums, self._gradients, self._rank = sums, gradients, rank
        self._groups = lru_cache(_KEPT)(lambda num_rows: NoiseGroups.of(plan, num_rows))
        for buckets in gradients.buckets.values():
            for bucket in buckets:
                bucket.measures = True

    def part(self, num_rows: int) -> float:
        """After all sums of a step: this rank's part of the noise of one sample's gradient; parts are added.

        The measured gradients are those of the mean over ``num_rows`` samples: squares are multiplied by
        ``num_rows``² to be those of sums over samples.
        """
        groups, terms = self._groups(num_rows), []
        for reduction, buckets in self._gradients.buckets.items():
            ranks = groups.contributing(reduction)
            if len(ranks) < 2:
                continue
            unit = num_rows**2 / (len(ranks) - 1)
            for bucket in buckets:
                if self._rank in ranks and bucket.own is not None:
                    terms.append(bucket.own * (unit / groups.rows[self._rank]))
                if self._rank == reduction.members[0]:
                    terms.append(bucket.squared_norm() * (-unit / num_rows))
        return float(torch.stack(terms).sum()) if terms else 0.0

    def reading(self, trace: float, norm: float, num_rows: int) -> NoiseReading | None:
        """From the parts of all ranks and the norm of the whole gradient.

        None where a short batch leaves a sum with samples of fewer than two groups.
        """
        groups = self._groups(num_rows)
        if any(len(groups.contributing(reduction)) < 2 for reduction in self._sums):
            return None
        noise = trace / num_rows
        return NoiseReading(samples=num_rows, noise=noise, signal=norm**2 - noise, trace=trace)


def watch_noise(plan: Plan, summed: Summed, gradients: object, recipe: Recipe, rank: int) -> NoiseWatch:
    """UnsupportedPlanError where gradients of groups of samples are not seen apart, whole on one rank."""
    if recipe.num_items is not None:
        raise UnsupportedPlanError(
            "noise=True counts samples, but with num_items a group weighs by its items, which only the last "
            "stage knows; leave one of them out"
        )
    if not isinstance(gradients, Gradients):
        raise UnsupportedPlanError(
            "noise=True sees each rank's gradient before it is summed, which DeepSpeed does not show under "
            "ZeRO-2 or 3; use ZeRO-1, or leave noise out"
        )
    sums = reductions(plan, summed)
    for reduction in sums:
        _refuse_together(plan, reduction)
    return NoiseWatch(plan, sums, gradients, rank)


def is_noise_seen(plan: Plan, summed: Summed) -> bool:
    """Whether a plan shows the noise: each sum takes the gradients of several groups of samples, whole."""
    try:
        for reduction in reductions(plan, summed):
            _refuse_together(plan, reduction)
    except UnsupportedPlanError:
        return False
    return True


def _refuse_together(plan: Plan, reduction: Reduction) -> None:
    where = f"the sum of gradients {reduction.name}"
    for form, _ in reduction.atoms:
        if form.is_of_experts or form.partial:
            raise UnsupportedPlanError(
                f"noise=True: {where} has {form.name}, of which several ranks each have a part of one "
                "group's gradient; these would have to be added before they are measured"
            )
    if len(_contributors(reduction)) < 2:
        raise UnsupportedPlanError(
            f"noise=True: {where} takes the gradient of one replica only, and noise is seen between "
            "replicas; give its stage two of them, or add a pipeline"
        )
    stages: dict[int, set[tuple[int, ...]]] = {}
    for rank in _contributors(reduction):
        mine = [place for place in places(plan) if place.rank == rank]
        holds = tuple(
            p.stage for p in mine if not set(holding(plan, p)[1].blocks).isdisjoint(reduction.blocks)
        )
        stages.setdefault(mine[0].pipeline, set()).add(holds)
    if any(len(kinds) > 1 for kinds in stages.values()):
        raise UnsupportedPlanError(
            f"noise=True: {reduction.name} is tied between stages of one pipeline on several ranks, whose "
            "copies would have to be added before they are measured; put the blocks that share it on one rank"
        )


def _contributors(reduction: Reduction) -> tuple[int, ...]:
    """Alike for all its parts, but for those that are refused."""
    return reduction.atoms[0][1].contributors if reduction.atoms else ()
