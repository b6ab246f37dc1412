"""How much better a rollout is than the others on the same problem: no value network, no problem of scale."""

from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOST = 1.5
"""A rollout that does not fit counts as one this much below the best, in the logarithm of its throughput; no
other counts for less, so that a few hopeless ones do not hide the differences of the good ones."""

ALIKE = 1e-6
"""Spread of the logarithms below which a group says nothing."""


def rewards_of(throughput: Floats) -> Floats:
    """``[num]``: logarithms of samples a second over the best of the group, from ``-LOST`` to 0."""
    best = float(throughput.max(initial=0.0))
    if best <= 0:
        return np.full(len(throughput), -LOST)
    with np.errstate(divide="ignore"):
        return np.maximum(-LOST, np.log(throughput / best))


def advantages(rewards: Floats, best_of: int) -> Floats:
    """``[num]``: credit of each rollout over the spread of the group; all 0 where none differs.

    ``best_of`` 1: the reward over the mean (GRPO, arXiv 2402.03300). ``best_of`` k: what a rollout adds to
    the best of k, on average over all its companions in the group, over the mean of that (the unbiased
    estimate of arXiv 2505.15201): a search takes the best of many proposals, and unlike ones help it more.
    """
    credit = rewards if best_of == 1 else _added_to_best(rewards, min(best_of, len(rewards)))
    spread = float(credit.std())
    return (credit - credit.mean()) / spread if spread > ALIKE else np.zeros(len(rewards))


def _added_to_best(rewards: Floats, best_of: int) -> Floats:
    """``[num]``: mean over all sets of ``best_of - 1`` others of how far a rollout exceeds their best."""
    num = len(rewards)
    sets = comb(num - 1, best_of - 1)
    # chance that the j-th of the sorted others is the best of such a set
    chance = np.array([comb(j, best_of - 2) / sets for j in range(num - 1)])
    order = np.sort(rewards)
    found = np.empty(num)
    for i, own in enumerate(rewards):
        others = np.delete(order, int(np.searchsorted(order, own)))
        found[i] = chance @ np.maximum(0.0, own - others)
    return found
