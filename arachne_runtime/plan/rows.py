"""Which rows of the global batch go where: to micro-batches, replicas, and between neighbour stages.

Rows of a global batch are numbered 0..n-1: pipeline by pipeline, then micro-batch by micro-batch, then
replica by replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .plan import Pipeline, Plan, ScheduleKind, Stage
from .shares import largest_remainder
from .tiling import shares_experts
from .zero import splits_gradients


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows that one replica of a stage hands to one replica of the next."""

    sender: int
    """Index of the replica that holds the rows before the boundary."""
    receiver: int
    rows: range


def consecutive(counts: Sequence[int], start: int = 0) -> tuple[range, ...]:
    """Ranges of the given lengths, one behind the other: ``[2, 1]`` from 5 → ``range(5, 7), range(7, 8)``."""
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=start)))


def micro_batch_rows(plan: Plan, num_rows: int) -> tuple[tuple[range, ...], ...]:
    """Rows of every micro-batch, by pipeline, for a batch of ``num_rows`` ≤ global_batch rows.

    A short batch is split by largest remainder in proportion to the full sizes; a micro-batch may get none.
    """
    sizes = [p.micro_batch for p in plan.pipelines for _ in range(p.micro_batches)]
    spans = iter(consecutive(largest_remainder(num_rows, sizes)))
    return tuple(tuple(next(spans) for _ in range(p.micro_batches)) for p in plan.pipelines)


def replica_rows(stage: Stage, rows: range) -> tuple[range, ...]:
    """Rows that each replica of ``stage`` takes of a micro-batch that holds ``rows``."""
    return consecutive(largest_remainder(len(rows), stage.shares), rows.start)


def has_guests(plan: Plan, pipeline: Pipeline, stage: Stage) -> bool:
    """Whether replicas of ``stage`` need one another for every micro-batch.

    They do where they share experts, or split gradients in each backward.
    """
    # interleaved, a device hands a micro-batch from stage to stage in its own memory
    stages = pipeline.stages if plan.schedule is ScheduleKind.INTERLEAVED else (stage,)
    return any(shares_experts(s) or splits_gradients(s) for s in stages)


def guest_row(rows: range) -> range:
    """What a replica without rows of its own plays of a micro-batch: the first row, whose loss has no weight.

    It keeps step with the replicas that share experts with it, and all that it computes is of a real sample.
    """
    return rows[:1]


def overlaps(before: Sequence[range], after: Sequence[range]) -> tuple[Overlap, ...]:
    """The rows that must cross between replicas that hold ``before`` and replicas that take ``after``."""
    return tuple(
        Overlap(s, r, range(max(a.start, b.start), min(a.stop, b.stop)))
        for s, a in enumerate(before)
        for r, b in enumerate(after)
        if max(a.start, b.start) < min(a.stop, b.stop)
    )
