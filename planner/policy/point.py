"""Rollouts at one point of their loop: the decisions that may be asked there, with features and masks."""

from dataclasses import dataclass, replace

import numpy as np

from .decision import MOST_STAGES, Bools, Decision, Floats, Head, Ints
from .features import overall_features, pool_constants, pool_features, site_constants
from .masks import Anything, Buildable, Masks
from .options import depth_options, length_options, pool_options, tp_options, width_options
from .progress import Progress
from .site import Site


class Point:
    """What all decisions until the next run share; alike rollouts are looked at once."""

    def __init__(self, of: "Rolling") -> None:
        self.site = of.site
        self.numbers = of.numbers
        self.features = of.features
        self.masks_of = Buildable if of.masked else Anything
        self.now = of.progress
        self.position, self.run = of.progress.position.copy(), of.progress.run.copy()
        self.alike = of.alike
        self._group()
        shape = len(of), of.site.num_pools, 0
        self.pools, self.overall = np.zeros(shape, np.float32), np.zeros(shape[::2], np.float32)
        if of.features:
            self.pools = pool_features(of.site, of.of_pools, self.few)[self.same]
            self.overall = overall_features(of.site, of.of_site, self.few)[self.same]

    def _group(self) -> None:
        """One of each alike are ``few``, whose rows are ``first``; ``same``: the place of each in those."""
        _, self.first, self.same = np.unique(self.alike, return_index=True, return_inverse=True)
        self.few = self.now.take(self.first)
        self.masks: Masks = self.masks_of(self.site, self.few)
        np.maximum(self.few.left, 0, out=self.few.left)  # without masks there may be less than nothing

    def tell(self, option: Ints) -> None:
        """What the rollouts chose: those that chose differently are not alike any more."""
        alike = np.unique(self.alike * (MOST_STAGES + 1) + option, return_inverse=True)[1]
        self.alike = np.asarray(alike, np.int64)
        if self.alike.max() >= len(self.first):
            self._group()

    def decision(self, head: Head, *chosen: Ints) -> Decision:
        """One head's question; ``chosen``: pool, index of the TP degree and width, as far as they are."""
        few = tuple(column[self.first] for column in chosen)
        mask = self._mask(head, *few)
        options = np.zeros((*mask.shape, 0), np.float32)
        if self.features:
            options = self._options(head, mask.shape[1], *few)
        return Decision(
            head=head,
            pools=self.pools,
            overall=self.overall,
            options=options[self.same],
            mask=mask[self.same],
            chosen_pool=chosen[0] if chosen else np.full(len(self.numbers), -1, np.int64),
            active=self.numbers,
            position=self.position,
            run=self.run,
            alike=self.alike,
        )

    def _mask(self, head: Head, *chosen: Ints) -> Bools:
        """Without the options behind the last one that any rollout may take, where there can be many."""
        match head:
            case Head.DEPTH:
                return _trimmed(self.masks.depth())
            case Head.POOL:
                return self.masks.pool()
            case Head.TP:
                return self.masks.tp(*chosen)
            case Head.WIDTH:
                return _trimmed(self.masks.width(*chosen))
            case Head.LENGTH:
                return _trimmed(self.masks.length(*chosen))

    def _options(self, head: Head, count: int, *chosen: Ints) -> Floats:
        match head:
            case Head.DEPTH:
                return depth_options(self.site, self.few, count - 1)
            case Head.POOL:
                return pool_options(self.site, self.few)
            case Head.TP:
                return tp_options(self.site, self.few, *chosen)
            case Head.WIDTH:
                return width_options(self.site, self.few, *chosen, most=count)
            case Head.LENGTH:
                return length_options(self.site, self.few, *chosen, most=count)


@dataclass(frozen=True, slots=True)
class Rolling:
    """A rollouts that are not done."""

    site: Site
    progress: Progress
    numbers: Ints
    """``[A]``"""
    alike: Ints
    """``[A]``: equal where all choices so far are."""
    of_pools: Floats
    of_site: Floats
    masked: bool
    features: bool

    @classmethod
    def of(cls, site: Site, num: int, *, masked: bool = True, features: bool = True) -> "Rolling":
        """At the beginning."""
        constants = pool_constants(site), site_constants(site)
        alike = np.zeros(num, np.int64)
        return cls(site, Progress.of(site, num), np.arange(num), alike, *constants, masked, features)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Ints) -> "Rolling":
        """A copy of some."""
        few = self.progress.take(rows)
        return replace(self, progress=few, numbers=self.numbers[rows], alike=self.alike[rows])

    def point(self) -> Point:
        """Where they are."""
        return Point(self)


def _trimmed(mask: Bools) -> Bools:
    return mask[:, : 1 + int(np.nonzero(mask.any(axis=0))[0].max())]
