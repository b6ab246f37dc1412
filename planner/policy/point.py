"""Rollouts at one point of their loop: the decisions that may be asked there, with features and masks."""

from dataclasses import dataclass, replace

import numpy as np

from .decision import Bools, Decision, Floats, Head, Ints
from .features import overall_features, pool_constants, pool_features, site_constants
from .masks import Anything, Buildable, Masks
from .options import depth_options, length_options, pool_options, tp_options, width_options
from .progress import Progress
from .site import Site


class Point:
    """What all decisions until the next run share."""

    def __init__(self, of: "Rolling") -> None:
        self.site = of.site
        self.numbers = of.numbers
        self.features = of.features
        now = of.progress.take(np.arange(len(of)))
        self.masks: Masks = Buildable(of.site, now) if of.masked else Anything(of.site, now)
        np.maximum(now.left, 0, out=now.left)  # without masks there may be less than nothing
        self.now = now
        if of.features:
            self.pools = pool_features(of.site, of.of_pools, now)
            self.overall = overall_features(of.site, of.of_site, now)
        else:
            self.pools = np.zeros((len(of), of.site.num_pools, 0), np.float32)
            self.overall = np.zeros((len(of), 0), np.float32)

    def decision(self, head: Head, *chosen: Ints) -> Decision:
        """One head's question; ``chosen``: pool, index of the TP degree and width, as far as they are."""
        mask = self._mask(head, *chosen)
        options = np.zeros((*mask.shape, 0), np.float32)
        if self.features:
            options = self._options(head, mask.shape[1], *chosen)
        return Decision(
            head=head,
            pools=self.pools,
            overall=self.overall,
            options=options,
            mask=mask,
            chosen_pool=chosen[0] if chosen else np.full(len(mask), -1, np.int64),
            active=self.numbers,
            position=self.now.position,
            run=self.now.run,
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
                return depth_options(self.site, self.now, count - 1)
            case Head.POOL:
                return pool_options(self.site, self.now)
            case Head.TP:
                return tp_options(self.site, self.now, *chosen)
            case Head.WIDTH:
                return width_options(self.site, self.now, *chosen, most=count)
            case Head.LENGTH:
                return length_options(self.site, self.now, *chosen, most=count)


@dataclass(frozen=True, slots=True)
class Rolling:
    """A rollouts that are not done."""

    site: Site
    progress: Progress
    numbers: Ints
    """``[A]``"""
    of_pools: Floats
    of_site: Floats
    masked: bool
    features: bool

    @classmethod
    def of(cls, site: Site, num: int, *, masked: bool = True, features: bool = True) -> "Rolling":
        """At the beginning."""
        constants = pool_constants(site), site_constants(site)
        return cls(site, Progress.of(site, num), np.arange(num), *constants, masked, features)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Ints) -> "Rolling":
        """A copy of some."""
        return replace(self, progress=self.progress.take(rows), numbers=self.numbers[rows])

    def point(self) -> Point:
        """Where they are."""
        return Point(self)


def _trimmed(mask: Bools) -> Bools:
    return mask[:, : 1 + int(np.nonzero(mask.any(axis=0))[0].max())]
