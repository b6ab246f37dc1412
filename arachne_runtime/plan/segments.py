"""Segments: maximal runs of blocks between any two cuts of any pipeline; gradients are summed by segment."""

from dataclasses import dataclass
from itertools import pairwise

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of blocks that is held whole, or not at all, by every stage of the plan."""

    start: int
    stop: int
    holders: tuple[tuple[int, int], ...]
    """The (pipeline, stage) pairs that hold it, one for each pipeline, in order."""

    @property
    def blocks(self) -> range:
        """Its block ids."""
        return range(self.start, self.stop)


def segments(plan: Plan) -> tuple[Segment, ...]:
    """All segments of a plan, in ascending block order."""
    cuts = sorted({edge for p in plan.pipelines for s in p.stages for edge in s.layers})
    return tuple(Segment(a, b, _holders(plan, a)) for a, b in pairwise(cuts))


def _holders(plan: Plan, block: int) -> tuple[tuple[int, int], ...]:
    return tuple(
        (p, s)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if block in stage.blocks
    )
