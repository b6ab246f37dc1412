"""How rival planners divide blocks among stages: evenly, in proportion, or to the least slowest stage."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.rows import consecutive
from arachne_runtime.plan.shares import largest_remainder

SECOND_HALVES = frozenset({"mlp", "moe"})
"""Kinds of half-layer blocks that belong to the attention block before them."""

Runs = NDArray[np.float64]
"""Seconds by (first block, end) of all runs, [L + 1, L + 1]."""


def even_layers(kinds: Sequence[str], num_stages: int) -> tuple[range, ...] | None:
    """Blocks by stage: layers dealt evenly, what is before them goes first, what is behind last.

    A layer begins with any block of a kind that occurs more than once. None where they are fewer than stages.
    """
    counts = Counter(kinds)
    repeated = {kind for kind, n in counts.items() if n > 1} - SECOND_HALVES
    repeated = repeated or {counts.most_common(1)[0][0]}
    layers = [i for i, kind in enumerate(kinds) if kind in repeated]
    if len(layers) < num_stages:
        return None
    runs = consecutive(largest_remainder(len(layers), [1] * num_stages))
    starts = [0, *(layers[run.start] for run in runs[1:]), len(kinds)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def least_slowest(stages: Sequence[Runs]) -> tuple[int, ...] | None:
    """Boundaries 0..L of the cut whose slowest stage takes least, no stage empty; None where none fits.

    A dynamic program over stages, O(depth L^2), vectorised over the blocks; ties go to the earlier boundary.
    """
    slowest = stages[0][0]
    choices = []
    for runs in stages[1:]:
        options = np.maximum(slowest[:, None], runs)
        choices.append(options.argmin(axis=0))
        slowest = options.min(axis=0)
    if not slowest[-1] < np.inf:
        return None
    return _traced(choices, len(slowest) - 1)


def least_slowest_of_every_depth(runs: Runs, max_depth: int) -> list[tuple[int, ...]]:
    """The same for 1 to ``max_depth`` alike stages at once, where every run fits."""
    num_blocks = len(runs) - 1
    slowest, choices = runs[0], list[NDArray[np.intp]]()
    found = [_traced(choices, num_blocks)]
    for _ in range(2, min(max_depth, num_blocks) + 1):
        options = np.maximum(slowest[:, None], runs)
        choices.append(options.argmin(axis=0))
        slowest = options.min(axis=0)
        found.append(_traced(choices, num_blocks))
    return found


def _traced(choices: Sequence[NDArray[np.intp]], num_blocks: int) -> tuple[int, ...]:
    bounds = [num_blocks]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return (0, *reversed(bounds))


def runs_of(prefix: Sequence[float], reach: Sequence[int] | None = None) -> Runs:
    """Seconds of every run of blocks; ``inf`` for no run, and for those beyond what fits (``reach``)."""
    sums = np.asarray(prefix, float)
    at = np.arange(len(sums))
    runs = np.where(at[None, :] > at[:, None], sums[None, :] - sums[:, None], np.inf)
    return runs if reach is None else within(runs, reach)


def within(runs: Runs, reach: Sequence[int]) -> Runs:
    """``inf`` for runs that end beyond what fits."""
    most = np.append(reach, len(runs) - 1)
    return np.where(np.arange(len(runs))[None, :] > most[:, None], np.inf, runs)


def in_proportion(
    prefix: Sequence[float], weights: Sequence[float], reaches: Sequence[Sequence[int]]
) -> tuple[int, ...] | None:
    """Boundaries 0..L that divide the whole in proportion to ``weights``, as near as memory admits.

    Stages are filled once, from the front, each to its part of what is left; None where memory admits no cut.
    """
    num_blocks, total = len(prefix) - 1, prefix[-1]
    ends = _possible_ends(reaches, num_blocks)
    bounds = [0]
    for s, weight in enumerate(weights):
        at = bounds[-1]
        possible = [end for end in ends[s] if at < end <= reaches[s][at]]
        if not possible:
            return None
        target = prefix[at] + (total - prefix[at]) * weight / sum(weights[s:])
        bounds.append(min(possible, key=lambda end: abs(prefix[end] - target)))
    return tuple(bounds)


def _possible_ends(reaches: Sequence[Sequence[int]], num_blocks: int) -> list[list[int]]:
    """By stage, ascending: where it may end such that those behind hold all the rest."""
    ends = [[num_blocks]]
    for reach in reversed(reaches[1:]):
        behind = ends[-1]
        starts = [i for i in range(num_blocks) if any(i < end <= reach[i] for end in behind)]
        ends.append(starts)
    return ends[::-1]
