"""How rival planners divide blocks among stages, if not exactly: evenly, or in proportion."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from arachne_runtime.plan.rows import consecutive
from arachne_runtime.plan.shares import largest_remainder

from ..cuts import Table

SECOND_HALVES = frozenset({"mlp", "moe"})
"""Kinds of half-layer blocks that belong to the attention block before them."""


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


def runs_of(prefix: Sequence[float], reach: Sequence[int] | None = None) -> Table:
    """Seconds of every run of blocks; ``inf`` for no run, and for those beyond what fits (``reach``)."""
    sums = np.asarray(prefix, float)
    at = np.arange(len(sums))
    runs = np.where(at[None, :] > at[:, None], sums[None, :] - sums[:, None], np.inf)
    return runs if reach is None else within(runs, reach)


def within(runs: Table, reach: Sequence[int]) -> Table:
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
