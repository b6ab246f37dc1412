"""Where many rollouts stand: what is left of the supply, and what the template in hand has so far."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decision import MOST_STAGES, Ints
from .site import MANY, Site

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Progress:
    """A rollouts between two runs; all arrays are theirs to change (``place``, ``begin``, ``finish``)."""

    left: Ints
    """``[A, P, L]``: places of each limit."""
    start: Ints
    """``[A, P, L]``: the same when the template began."""
    samples_left: Ints
    """``[A]``: of the global batch, that no pipeline takes yet, at the smallest micro-batches."""
    position: Ints
    """``[A]``: complete templates."""
    run: Ints
    """``[A]``: complete runs of the template in hand."""
    depth: Ints
    """``[A]``: its stages, 0 between two templates."""
    stages_left: Ints
    """``[A]``: that have no place yet."""
    last: Ints
    """``[A, 3]``: pool, index of the TP degree and width of the last run; pool -1 where there is none."""
    runs_of: Ints
    """``[A, P]``: runs on each pool."""
    widest: Ints
    """``[A]``: samples of the smallest micro-batch that gives every replica the share it needs."""
    copies: Ints
    """``[A]``: of the runs so far that what was left when the template began holds; 1 where there is none."""
    held: Reals
    """``[A]``: parts of the model that its stages hold."""
    states: Reals
    """``[A]``: parts of the model's states that they hold at the most."""
    speeds: Reals
    """``[A, 3]``: sum, smallest and last of its stages' speeds."""
    before: Ints
    """``[A]``: stages of the template before this one."""
    stages: Ints
    """``[A, MOST_STAGES, 3]``: pool, TP degree (not its index) and width."""

    @classmethod
    def of(cls, site: Site, num: int) -> "Progress":
        """At the beginning."""
        left = np.repeat(site.places[None], num, axis=0)
        zero = [np.zeros(num, np.int64) for _ in range(7)]
        return cls(
            left=left,
            start=left.copy(),
            samples_left=np.full(num, site.global_batch, np.int64),
            position=zero[0],
            run=zero[1],
            depth=zero[2],
            stages_left=zero[3],
            last=np.full((num, 3), -1, np.int64),
            runs_of=np.zeros((num, site.num_pools), np.int64),
            widest=zero[4],
            copies=np.ones(num, np.int64),
            held=np.zeros(num),
            states=np.zeros(num),
            speeds=np.zeros((num, 3)),
            before=zero[5],
            stages=np.zeros((num, MOST_STAGES, 3), np.int64),
        )

    def take(self, rows: Ints) -> "Progress":
        """A copy of some."""
        return Progress(*(getattr(self, name)[rows] for name in FIELDS))

    def begin(self, rows: Ints, depth: Ints) -> None:
        """A template of so many stages."""
        self.depth[rows] = self.stages_left[rows] = depth

    def place(self, site: Site, rows: Ints, pool: Ints, tp: Ints, width: Ints, length: Ints) -> None:
        """A run of ``length`` stages; ``tp`` is an index of ``Site.degrees``."""
        self.left[rows, pool] -= (width * length)[:, None] * site.takes[pool, tp]
        at = self.depth[rows] - self.stages_left[rows]
        stage = np.arange(MOST_STAGES)
        here = (stage >= at[:, None]) & (stage < (at + length)[:, None])
        degrees = np.asarray(site.degrees, np.int64)
        made = np.stack([pool, degrees[tp], width], axis=1)
        kept = np.where((stage < at[:, None])[:, :, None], self.stages[rows], 0)
        self.stages[rows] = np.where(here[:, :, None], made[:, None], kept)
        self.stages_left[rows] -= length
        copies = _quotient(self.start[rows, pool], self.start[rows, pool] - self.left[rows, pool])
        self.copies[rows] = np.where(self.run[rows] > 0, np.minimum(self.copies[rows], copies), copies)
        self.run[rows] += 1
        self.runs_of[rows, pool] += 1
        self.widest[rows] = np.maximum(self.widest[rows], width * site.least_share[pool, tp])
        self.held[rows] += length * site.holds[pool, tp]
        self.states[rows] += length * site.holds_states[pool, tp]
        speed = width * site.speed[pool, tp].max(axis=1)
        old = self.speeds[rows]
        slowest = np.where(old[:, 1] > 0, np.minimum(old[:, 1], speed), speed)
        self.speeds[rows] = np.stack([old[:, 0] + length * speed, slowest, speed], axis=1)
        self.last[rows] = np.stack([pool, tp, width], axis=1)

    def finish(self, rows: Ints) -> Ints:
        """The template stands as often as what was left when it began holds it; how often.

        Widths are divided by what they have in common first: half as wide is the same, twice.
        """
        width = self.stages[rows, :, 2]
        common = np.maximum(1, np.gcd.reduce(width, axis=1))
        self.stages[rows, :, 2] = width // common[:, None]
        used = (self.start[rows] - self.left[rows]) // common[:, None, None]
        widest = self.widest[rows] // common
        every = (len(rows), -1)
        fitting = _quotient(self.start[rows].reshape(every), used.reshape(every))
        copies = np.minimum(fitting, self.samples_left[rows] // np.maximum(1, widest))
        self.left[rows] = self.start[rows] - copies[:, None, None] * used
        self.samples_left[rows] -= copies * widest
        self.before[rows] = self.depth[rows]
        self.position[rows] += 1
        self._clear(rows)
        return np.asarray(copies, np.int64)

    def _clear(self, rows: Ints) -> None:
        """Between two templates; the stages of the one before stay until another overwrites them."""
        self.start[rows] = self.left[rows]
        self.depth[rows] = self.run[rows] = self.runs_of[rows] = self.widest[rows] = 0
        self.held[rows] = self.states[rows] = self.speeds[rows] = 0
        self.copies[rows] = 1
        self.last[rows] = -1


def _quotient(have: Ints, each: Ints) -> Ints:
    """``[A]``: how often all of ``each`` are in ``have``, both ``[A, L]``."""
    often: NDArray[Any] = np.where(each > 0, have / np.maximum(each, 1), MANY)
    return np.asarray(np.floor(often.min(axis=1)), np.int64)


FIELDS = tuple(field.name for field in fields(Progress))
