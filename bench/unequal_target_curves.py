"""What bench.unequal_target reads from curves of loss: when one reaches a target, how far two are apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from .unequal_target_records import Point


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Where a contestant was when it reached a loss; infinite if it never did."""

    seconds: float = math.inf
    progress: float = math.inf


def reached(points: Sequence[Point], target: float) -> Reached:
    """When the loss was at the target and stayed there at the next look; between looks by a straight line."""
    for number, (before, point) in enumerate(pairwise(points)):
        after = points[number + 2 : number + 3]
        if before.loss > target and all(one.loss <= target for one in (point, *after)):
            part = (before.loss - target) / (before.loss - point.loss)
            return Reached(
                seconds=before.seconds + part * (point.seconds - before.seconds),
                progress=before.progress + part * (point.progress - before.progress),
            )
    return Reached()


def apart(one: Sequence[Point], other: Sequence[Point]) -> float:
    """Mean relative difference of two losses at the same progress, where both have been."""
    reach = min(one[-1].progress, other[-1].progress)
    gaps = [
        abs(point.loss / loss_at(other, point.progress) - 1) for point in one if 0 < point.progress <= reach
    ]
    return fmean(gaps) if gaps else math.nan


def loss_at(points: Sequence[Point], progress: float) -> float:
    """By a straight line between two looks."""
    for before, after in pairwise(points):
        if before.progress <= progress <= after.progress and before.progress < after.progress:
            part = (progress - before.progress) / (after.progress - before.progress)
            return before.loss + part * (after.loss - before.loss)
    raise ValueError(f"progress {progress} is outside of the curve")
