"""What may be chosen at each decision, so that whatever comes out can be built."""

from typing import Protocol

import numpy as np

from .decision import WIDTHS, Bools, Ints
from .progress import Progress
from .site import MANY, Site


class Masks(Protocol):
    """Allowed options of rollouts that stand at the same head; in every row there is one."""

    def depth(self) -> Bools:
        """``[A, D + 1]``"""
        ...

    def pool(self) -> Bools:
        """``[A, P]``"""
        ...

    def tp(self, pool: Ints) -> Bools:
        """``[A, T]``"""
        ...

    def width(self, pool: Ints, tp: Ints) -> Bools:
        """``[A, W]``"""
        ...

    def length(self, pool: Ints, tp: Ints, width: Ints) -> Bools:
        """``[A, N]``"""
        ...


class Buildable:
    """Every stage that is left still finds a group: of its pool, or of any, at the degree that makes most."""

    def __init__(self, site: Site, now: Progress) -> None:
        self.site = site
        self.now = now
        self.groups = site.groups(now.left)
        self.most = self.groups[:, np.arange(site.num_pools), site.least]
        self.samples = np.minimum(now.samples_left, site.most_micro_batch)

    def depth(self) -> Bools:
        """A template needs samples for any share that was measured, since its pools are not known yet."""
        deepest = np.minimum(self.most.sum(axis=1), self.site.most_stages)
        shares = self.site.least_share[self.site.usable].max()
        deepest = np.where(self.now.samples_left >= shares, deepest, 0)
        mask: Bools = np.arange(self.site.most_stages + 1)[None] <= deepest[:, None]
        mask[:, 0] = self.now.position > 0
        return mask

    def pool(self) -> Bools:
        """One group of it takes no more than one stage needs."""
        return np.asarray(self.most > 0)

    def tp(self, pool: Ints) -> Bools:
        """One group."""
        own = np.arange(len(pool))
        fits = self.site.usable[pool] & (self.groups[own, pool] >= 1)
        degrees = np.arange(len(self.site.degrees))[None]
        after = self._after(pool[:, None], degrees, np.ones((1, 1), np.int64))
        return np.asarray(fits & (after >= self.now.stages_left[:, None] - 1))

    def width(self, pool: Ints, tp: Ints) -> Bools:
        """One stage; the smallest micro-batch must be within the global batch."""
        own = np.arange(len(pool))
        widths = np.asarray(WIDTHS)[None]
        fits = widths <= self.groups[own, pool, tp][:, None]
        fits &= widths * self.site.least_share[pool, tp][:, None] <= self.samples[:, None]
        after = self._after(pool[:, None], tp[:, None], widths)
        mask = fits & (after >= self.now.stages_left[:, None] - 1)
        # two alike runs behind each other are one, said again; but there must be a way on
        last_pool, last_tp, last_width = self.now.last.T
        again = (widths == last_width[:, None]) & ((last_pool == pool) & (last_tp == tp))[:, None]
        other = mask & ~again
        return np.asarray(np.where(other.any(axis=1, keepdims=True), other, mask))

    def length(self, pool: Ints, tp: Ints, width: Ints) -> Bools:
        """So many stages."""
        own = np.arange(len(pool))
        lengths = np.arange(1, int(self.now.stages_left.max()) + 1)[None]
        rest = self.now.stages_left[:, None] - lengths
        taken = lengths * width[:, None]
        fits = (rest >= 0) & (taken <= self.groups[own, pool, tp][:, None])
        return np.asarray(fits & (self._after(pool[:, None], tp[:, None], taken) >= rest))

    def _after(self, pool: Ints, tp: Ints, taken: Ints) -> Ints:
        """``[A, C]``: groups that all pools still make after ``taken`` of ``pool``."""
        site, own = self.site, np.arange(len(pool))[:, None]
        least = site.takes[pool, site.least[pool]]
        left = self.now.left[own, pool] - taken[:, :, None] * site.takes[pool, tp]
        each = np.where(least > 0, left // np.maximum(1, least), MANY).min(axis=2)
        others = self.most.sum(axis=1, keepdims=True) - self.most[own, pool]
        return np.asarray(np.maximum(each, 0) + others)


class Anything:
    """Whatever has a meaning, whether devices are left for it or not: for the ablation without masks."""

    def __init__(self, site: Site, now: Progress) -> None:
        self.site = site
        self.now = now

    def depth(self) -> Bools:
        """Every depth."""
        mask: Bools = np.ones((len(self.now.depth), self.site.most_stages + 1), bool)
        mask[:, 0] = self.now.position > 0
        return mask

    def pool(self) -> Bools:
        """Every pool with a TP degree."""
        usable: Bools = np.asarray(self.site.usable.any(axis=1))
        return np.repeat(usable[None], len(self.now.depth), axis=0)

    def tp(self, pool: Ints) -> Bools:
        """Those that were measured."""
        return np.asarray(self.site.usable[pool])

    def width(self, pool: Ints, tp: Ints) -> Bools:
        """Every one."""
        return np.ones((len(pool), len(WIDTHS)), bool)

    def length(self, pool: Ints, tp: Ints, width: Ints) -> Bools:
        """Up to all stages that are left."""
        lengths = np.arange(1, int(self.now.stages_left.max()) + 1)
        return np.asarray(lengths <= self.now.stages_left[:, None])
