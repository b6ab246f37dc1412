"""What may be chosen at each decision, so that whatever comes out can be built."""

from typing import Protocol

import numpy as np

from .decision import MOST_RUNS, WIDTHS, Bools, Ints
from .memory import Memory, preferred
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
    """Every stage that is left still finds a group, in as many runs as are left to the template.

    A pool makes most groups at its smallest usable degree, and several runs there make no more than one.
    Where there is a choice, what can't hold the model is left out too.
    """

    def __init__(self, site: Site, now: Progress) -> None:
        self.site = site
        self.now = now
        self.groups = site.groups(now.left)
        self.most = self.groups[:, np.arange(site.num_pools), site.least]
        self.samples = np.minimum(now.samples_left, site.most_micro_batch)
        self.own = np.arange(len(now.depth))
        self.runs = MOST_RUNS - 1 - now.run
        """``[A]``: behind the next one."""
        self.scarce = bool((self.runs < site.num_pools).any())
        self.memory = Memory.of(site, now, self.groups)

    def depth(self) -> Bools:
        """A template needs samples for any share that was measured, since its pools are not known yet."""
        largest = -np.sort(-self.most, axis=1)[:, :MOST_RUNS].sum(axis=1)
        deepest = np.minimum(largest, self.site.most_stages)
        shares = self.site.least_share[self.site.usable].max()
        deepest = np.where(self.now.samples_left >= shares, deepest, 0)
        depths = np.arange(self.site.most_stages + 1)[None]
        mask: Bools = depths <= deepest[:, None]
        mask[:, 0] = self.now.position > 0
        fits = self.memory.fits(0.0, depths) | (depths == 0)
        return preferred(mask, fits)

    def pool(self) -> Bools:
        """All of it and of those that fit into the runs behind are enough."""
        mask: Bools = self.most > 0
        if self.scarce:
            pools = range(self.site.num_pools)
            rest = [self._largest(np.full(len(self.own), p), self.runs) for p in pools]
            mask = mask & (self.most + np.stack(rest, axis=1) >= self.now.stages_left[:, None])
        one = self.site.holds_states[np.arange(self.site.num_pools), self.site.greatest]
        return preferred(mask, self.memory.fits(one, self.now.stages_left[:, None] - 1))

    def tp(self, pool: Ints) -> Bools:
        """One group of each stage."""
        degrees = np.arange(len(self.site.degrees))[None]
        fits = self.site.usable[pool] & (self.groups[self.own, pool] >= 1)
        mask = fits & self._goes_on(pool[:, None], degrees, np.ones((1, 1), np.int64))
        one = self.site.holds_states[pool]
        return preferred(mask, self.memory.fits(one, self.now.stages_left[:, None] - 1))

    def width(self, pool: Ints, tp: Ints) -> Bools:
        """So many groups of each stage; the smallest micro-batch must be within the global batch."""
        widths = np.asarray(WIDTHS)[None]
        fits = widths <= self.groups[self.own, pool, tp][:, None]
        fits &= widths * self.site.least_share[pool, tp][:, None] <= self.samples[:, None]
        mask = fits & self._goes_on(pool[:, None], tp[:, None], widths)
        # two alike runs behind each other are one, said again; but there must be a way on
        last_pool, last_tp, last_width = self.now.last.T
        again = (widths == last_width[:, None]) & ((last_pool == pool) & (last_tp == tp))[:, None]
        return preferred(mask, ~again)

    def length(self, pool: Ints, tp: Ints, width: Ints) -> Bools:
        """So many stages."""
        lengths = np.arange(1, int(self.now.stages_left.max()) + 1)[None]
        rest = self.now.stages_left[:, None] - lengths
        taken = lengths * width[:, None]
        fits = (rest >= 0) & (taken <= self.groups[self.own, pool, tp][:, None])
        mask: Bools = fits & (self._after(pool[:, None], tp[:, None], taken) >= rest)
        states = lengths * self.site.holds_states[pool, tp][:, None]
        return preferred(mask, self.memory.fits(states, np.maximum(0, rest)))

    def _goes_on(self, pool: Ints, tp: Ints, width: Ints) -> Bools:
        """``[A, C]``: whether a run of one stage, or one as long as can be, leaves enough for the others."""
        stages = self.now.stages_left[:, None]
        found = self._after(pool, tp, width) >= stages - 1
        if self.scarce:
            longest = np.clip(self.groups[self.own[:, None], pool, tp] // width, 1, stages)
            found |= self._after(pool, tp, longest * width) >= stages - longest
        return np.asarray(found)

    def _after(self, pool: Ints, tp: Ints, taken: Ints) -> Ints:
        """``[A, C]``: stages that the runs behind can make, once ``taken`` groups of ``pool`` are gone."""
        site, own = self.site, self.own[:, None]
        least = site.takes[pool, site.least[pool]]
        left = self.now.left[own, pool] - taken[:, :, None] * site.takes[pool, tp]
        each = np.floor(np.where(least > 0, left / np.maximum(1, least), MANY).min(axis=2)).astype(np.int64)
        if not self.scarce:
            others = self.most.sum(axis=1, keepdims=True) - self.most[own, pool]
            return np.asarray(others + np.maximum(each, 0), np.int64)
        without, beside = (self._largest(pool[:, 0], self.runs - less)[:, None] for less in (0, 1))
        return np.asarray(np.where(self.runs[:, None] > 0, np.maximum(without, beside + each), 0), np.int64)

    def _largest(self, pool: Ints, runs: Ints) -> Ints:
        """``[A]``: stages that the other pools make in so many runs."""
        others = self.most.copy()
        others[self.own, pool] = 0
        total = np.cumsum(-np.sort(-others, axis=1), axis=1)
        some = np.clip(runs, 1, self.site.num_pools) - 1
        return np.where(runs > 0, total[self.own, some], 0)


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
