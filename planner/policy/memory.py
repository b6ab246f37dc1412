"""How much of a model stages can hold at the most: what can't fit is not worth a sample."""

from dataclasses import dataclass

import numpy as np

from .decision import Bools, Ints
from .progress import Progress, Reals
from .site import Site

ROUNDING = 1e-6
"""Parts of a model that sums may err by."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of rollouts at one point: the most there is in every figure, so that nothing that fits is kept out."""

    states: Reals
    """``[A]``: parts of the model's states that the stages so far hold."""
    each: Reals
    """``[tiers]``: parts that one stage holds, most first."""
    counts: Ints
    """``[A, tiers]``: such stages that there can be."""
    before: Ints
    """``[A, tiers]``: stages of the tiers before."""

    @classmethod
    def of(cls, site: Site, now: Progress, groups: Ints) -> "Memory":
        """First the groups of the largest TP degree, then single ones of the devices that these leave.

        Smaller groups of the same devices hold no more together, but where experts are spread over them.
        """
        pool = np.arange(site.num_pools)
        large, small = groups[:, pool, site.greatest], groups[:, pool, site.least]
        most = site.holds_states[pool, site.greatest] * site.usable.any(axis=1)
        if site.experts > 0:
            each, counts = most, small
        else:
            degrees = np.asarray(site.degrees)
            times = degrees[site.greatest] // degrees[site.least]
            each = np.concatenate([most, site.holds_states[pool, site.least]])
            counts = np.concatenate([large, np.maximum(0, small - large * times)], axis=1)
        order = np.argsort(-each, kind="stable")
        counts = counts[:, order]
        return cls(now.states, each[order], counts, np.cumsum(counts, axis=1) - counts)

    def fits(self, more: Reals | float, stages: Ints) -> Bools:
        """``[A, C]``: whether the stages so far, ``more``, and the best other ``stages`` hold the model."""
        some = np.clip(stages[:, :, None] - self.before[:, None], 0, self.counts[:, None])
        held = self.states[:, None] + more + some @ self.each
        return np.asarray(held >= 1 - ROUNDING)


def preferred(mask: Bools, also: Bools) -> Bools:
    """Both, in the rows where something is left; there must be a way on."""
    both = mask & also
    return np.asarray(np.where(both.any(axis=1, keepdims=True), both, mask))
