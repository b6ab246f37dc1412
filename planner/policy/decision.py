"""What a chooser sees and answers: heads, their options, and one decision of many rollouts at once."""

from dataclasses import dataclass
from enum import StrEnum
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One head's question to A rollouts, with P pools and C options."""

    head: Head
    pools: Floats
    """``[A, P, FP]``; the same array as before where nothing was placed in between."""
    overall: Floats
    """``[A, FG]``; likewise."""
    options: Floats
    """``[A, C, FH]``: FH differs by head."""
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
    alike: Ints
    """``[A]``: equal for rollouts that have made the same choices so far: all they see here is equal."""


class Chooser(Protocol):
    """Answers decisions."""

    def __call__(self, decision: Decision) -> Ints:
        """``[A]``: index of an allowed option."""
        ...
