"""Rollouts at one point of their loop: the decisions that may be asked there, with features and masks."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .decision import Bools, Decision, Floats, Head, Ints
from .features import overall_features, pool_constants, pool_features, site_constants
from .masks import Anything, Buildable, Masks
from .options import depth_options, length_options, pool_options, tp_options, width_options
from .progress import Progress
from .site import Site


@dataclass(frozen=True, slots=True)
class Rolling:
    """A rollouts that are not done."""

    site: Site
    progress: Progress
    numbers: Ints
    """``[A]``"""
    alike: Ints
    """``[A]``: equal where all choices so far are."""
    constants: tuple[Floats, Floats]
    """Features of pools and of the site that no step changes."""
    masked: bool

    @classmethod
    def of(cls, site: Site, num: int, *, masked: bool = True) -> "Rolling":
        """At the beginning."""
        constants = pool_constants(site), site_constants(site)
        return cls(site, Progress.of(site, num), np.arange(num), np.zeros(num, np.int64), constants, masked)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Ints) -> "Rolling":
        """A copy of some."""
        few = self.progress.take(rows)
        return replace(self, progress=few, numbers=self.numbers[rows], alike=self.alike[rows])


class View:
    """What unlike rollouts see and may do; it outlives the point, as nothing changes what it holds."""

    def __init__(self, of: Rolling, now: Progress) -> None:
        self.site = of.site
        self.constants = of.constants
        self.masks: Masks = Buildable(of.site, now) if of.masked else Anything(of.site, now)
        np.maximum(now.left, 0, out=now.left)  # without masks there may be less than nothing
        self.now = now

    @cached_property
    def pools(self) -> Floats:
        """``[U, P, FP]``"""
        return pool_features(self.site, self.constants[0], self.now)

    @cached_property
    def overall(self) -> Floats:
        """``[U, FG]``"""
        return overall_features(self.site, self.constants[1], self.now)

    def mask(self, head: Head, chosen: tuple[Ints, ...]) -> Bools:
        """``[U, C]``, without options behind the last one that any may take, where there can be many."""
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

    def options(self, head: Head, count: int, chosen: tuple[Ints, ...]) -> Floats:
        """``[U, C, FH]``"""
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


class Point:
    """All decisions until the next run is placed.

    With ``since``, rows of an earlier point, which see pools and site as it does: ``[A]`` of its rows.
    """

    def __init__(self, of: Rolling, since: "tuple[Point, Ints] | None" = None) -> None:
        self.of = of
        self.position, self.run = of.progress.position.copy(), of.progress.run.copy()
        self.alike = of.alike
        self._group()
        self.before, self.rows = self.view, self.same
        if since is not None:
            earlier, rows = since
            self.before, self.rows = earlier.before, earlier.rows[rows]

    def _group(self) -> None:
        """One of each alike."""
        _, self.first, self.same = np.unique(self.alike, return_index=True, return_inverse=True)
        self.view = View(self.of, self.of.progress.take(self.first))

    def decision(self, head: Head, *chosen: Ints) -> Decision:
        """One head's question; ``chosen``: pool, index of the TP degree and width, as far as they are."""
        few = tuple(column[self.first] for column in chosen)
        return Decision(
            head=head,
            mask=self.view.mask(head, few)[self.same],
            chosen_pool=chosen[0] if chosen else np.full(len(self.of), -1, np.int64),
            active=self.of.numbers,
            position=self.position,
            run=self.run,
            first=self.first,
            same=self.same,
            unlike=self.view,
            seen=self.before,
            rows=self.rows,
            chosen=few,
        )

    def tell(self, option: Ints) -> None:
        """What the rollouts chose: those that chose differently are not alike any more."""
        alike = np.unique(self.alike * (1 + int(option.max())) + option, return_inverse=True)[1]
        self.alike = np.asarray(alike, np.int64)
        if self.alike.max() >= len(self.first):
            self._group()


def _trimmed(mask: Bools) -> Bools:
    return mask[:, : 1 + int(np.nonzero(mask.any(axis=0))[0].max())]
