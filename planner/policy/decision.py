"""What a chooser sees and answers: heads, their options, and one decision of many rollouts at once."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

MOST_STAGES = 64
"""Stages of a template at the most."""

WIDTHS: tuple[int, ...] = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Options of the width head."""

MOST_RUNS = 8
"""Runs of alike stages of a template at the most: of 600 labels of long searches none has more than 7."""

MOST_TEMPLATES = 3
"""Unlike templates of one rollout: more are found by packing those of several rollouts."""


class Head(StrEnum):
    """What is decided, in this order; the last four again for every run of alike stages."""

    DEPTH = "depth"
    """Option 0 stops, option d begins a template of d stages."""
    POOL = "pool"
    """Option p: the pool of the run's devices."""
    TP = "tp"
    """Options are ``Site.degrees``."""
    WIDTH = "width"
    """Options are ``WIDTHS``."""
    LENGTH = "length"
    """Option n - 1: n such stages follow each other."""


class Seen(Protocol):
    """Features of U unlike rollouts."""

    @property
    def pools(self) -> Floats:
        """``[U, P, FP]``"""
        ...

    @property
    def overall(self) -> Floats:
        """``[U, FG]``"""
        ...

    def options(self, head: Head, count: int, chosen: tuple[Ints, ...]) -> Floats:
        """``[U, C, FH]`` of ``count`` options."""
        ...


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One head's question to A rollouts, with P pools and C options; features are worked out when looked at.

    Rollouts that have made the same choices so far are alike: all they see is equal, and worked out once.
    """

    head: Head
    mask: Bools
    """``[A, C]``: what may be chosen; in each row something."""
    chosen_pool: Ints
    """``[A]``: of this run; -1 before it is chosen."""
    active: Ints
    """``[A]``: numbers of the rollouts."""
    position: Ints
    """``[A]``: which template of the rollout it is about."""
    run: Ints
    """``[A]``: which run of that template; 0 at its depth."""
    first: Ints
    """``[U]``: one row of each alike."""
    same: Ints
    """``[A]``: place in ``first`` of the row that each is like."""
    unlike: Seen
    """By the rows of ``first``."""
    seen: Seen
    """Of fewer: as it was before this run, of which all its decisions see pools and the site."""
    rows: Ints
    """``[A]``: place in ``seen``."""
    chosen: tuple[Ints, ...]
    """``[U]`` each, by the rows of ``first``: pool, index of the TP degree, width, as far as known."""

    @cached_property
    def pools(self) -> Floats:
        """``[A, P, FP]``"""
        return self.seen.pools[self.rows]

    @cached_property
    def overall(self) -> Floats:
        """``[A, FG]``"""
        return self.seen.overall[self.rows]

    @cached_property
    def unlike_options(self) -> Floats:
        """``[U, C, FH]``: of the rows of ``first``."""
        return self.unlike.options(self.head, self.mask.shape[1], self.chosen)

    @property
    def options(self) -> Floats:
        """``[A, C, FH]``: FH differs by head."""
        return self.unlike_options[self.same]


class Chooser(Protocol):
    """Answers decisions."""

    def __call__(self, decision: Decision) -> Ints:
        """``[A]``: index of an allowed option."""
        ...
