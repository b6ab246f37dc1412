"""The loop in which templates arise, decision by decision, for many rollouts at once.

Sampling, replaying of labels and uniform choice differ in their chooser only. Masks see to it that whatever
comes out can be built: every group of every copy has its devices, within the limits of ``Supply``.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..search.shapes import Shapes
from .decision import MOST_TEMPLATES, WIDTHS, Chooser, Head, Ints
from .point import Point, Rolling
from .site import Site


@dataclass(frozen=True, slots=True)
class Rollouts:
    """N templates of ``num`` rollouts, in the order in which they were complete."""

    shapes: Shapes
    rollout: Ints
    """``[N]``: which rollout each belongs to."""
    position: Ints
    """``[N]``: first, second, ... template of it."""
    copies: Ints
    """``[N]``: how many stand beside each other; all templates of a rollout fit at once."""
    num: int


def roll(
    site: Site,
    num: int,
    choose: Chooser,
    *,
    most_templates: int = MOST_TEMPLATES,
    masked: bool = True,
) -> Rollouts:
    """``num`` rollouts of up to ``most_templates`` templates each, as ``choose`` decides.

    A rollout that has them all is not asked any more. Not ``masked``: what was chosen and can't be built is
    dropped, and its rollout ends.
    """
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    rolling = _begun(Rolling.of(site, num, masked=masked), choose)
    while len(rolling):
        progress, point = rolling.progress, Point(rolling)
        progress.place(site, np.arange(len(rolling)), *_chosen_run(point, choose))
        rolling = replace(rolling, alike=point.alike)
        done = np.nonzero(progress.stages_left == 0)[0]
        if len(done):
            position, copies = progress.position[done], progress.finish(done)
            built = copies > 0
            rows = done[built]
            found.append((rolling.numbers[rows], position[built], copies[built], progress.stages[rows]))
            on = np.ones(len(rolling), bool)
            on[done] = built & (progress.position[done] < most_templates)
            rolling = _begun(rolling.take(np.nonzero(on)[0]), choose)
    rows, position, copies, stages = (np.concatenate(part) for part in zip(*found, strict=True))
    return Rollouts(shapes_of_stages(stages), rows, position, copies, num)


def shapes_of_stages(stages: Ints) -> Shapes:
    """From ``[N, S, 3]``: pool, TP degree and width."""
    size = max(1, int((stages[:, :, 2] > 0).sum(axis=1).max(initial=1)))
    pool, tp, width = np.moveaxis(stages[:, :size], 2, 0)
    return Shapes(pool.copy(), np.where(width > 0, tp, 1), width.copy())


def _begun(rolling: Rolling, choose: Chooser) -> Rolling:
    """Those that are between two templates begin one, or stop and are left out."""
    between = np.nonzero(rolling.progress.depth == 0)[0]
    if not len(between):
        return rolling
    point = Point(rolling.take(between))
    depth = _answer(point, choose, Head.DEPTH)
    on = depth > 0
    rolling.progress.begin(between[on], depth[on])
    rolling.alike[between] = rolling.alike.max() + 1 + point.alike
    return rolling.take(np.nonzero(rolling.progress.depth > 0)[0])


def _chosen_run(point: Point, choose: Chooser) -> tuple[Ints, Ints, Ints, Ints]:
    """Pool, index of the TP degree, width and length."""
    pool = _answer(point, choose, Head.POOL)
    tp = _answer(point, choose, Head.TP, pool)
    width = np.asarray(WIDTHS)[_answer(point, choose, Head.WIDTH, pool, tp)]
    return pool, tp, width, 1 + _answer(point, choose, Head.LENGTH, pool, tp, width)


def _answer(point: Point, choose: Chooser, head: Head, *chosen: Ints) -> Ints:
    decision = point.decision(head, *chosen)
    found = np.asarray(choose(decision), np.int64)
    assert decision.mask[np.arange(len(found)), found].all(), f"{head}: not allowed"
    point.tell(found)
    return found
