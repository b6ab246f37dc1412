"""Unlike templates by a network, the likeliest or samples: a beam of rows that all stand at the same head.

Samples without replacement are the largest of log-likelihoods with Gumbel noise, where the noise of what goes
on from a row is drawn so that its largest value is the row's own (Kool et al., arXiv 1903.06059, section 3).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..search.shapes import Shapes
from .choosers import Network
from .decision import WIDTHS, Head, Ints
from .point import Point, Rolling
from .roll import shapes_of_stages
from .site import Site

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """What makes samples of a beam."""

    generator: np.random.Generator
    temperature: float = 1.0
    """Above 1: nearer to uniform choice."""


def beam_search(site: Site, network: Network, size: int, noise: Noise | None = None) -> Shapes:
    """At most ``size`` first templates, likeliest first; with noise samples, of which no two are the same."""
    beam = _Beam(network, size, Rolling.of(site, 1), noise)
    depth = beam.extend(Head.DEPTH)
    beam.rolling.progress.begin(np.arange(len(depth)), depth)
    stages: list[Ints] = []
    ranks: list[Reals] = []
    while len(beam.rolling):
        beam.add_run()
        done = beam.rolling.progress.stages_left == 0
        stages.append(beam.rolling.progress.stages[done])
        ranks.append(beam.ranks[done])
        # what goes on only falls: behind as many finished ones it is left
        finished = np.sort(np.concatenate(ranks))[::-1]
        least = finished[size - 1] if len(finished) >= size else -np.inf
        beam.keep(np.nonzero(~done & (beam.ranks > least))[0])
    order = np.argsort(-np.concatenate(ranks), kind="stable")[:size]
    return shapes_of_stages(np.concatenate(stages)[order]).primitive().distinct()


class _Beam:
    """Rows with their likelihoods; each is a rollout."""

    def __init__(self, network: Network, size: int, rolling: Rolling, noise: Noise | None) -> None:
        self.network = network
        self.size = size
        self.rolling = rolling
        self.point = Point(rolling)
        self.noise = noise
        self.chances: Reals = np.zeros(len(rolling))
        """Logarithm of the probability of each row's choices so far."""
        self.ranks: Reals = np.zeros(len(rolling))
        """By which rows are kept: their chances, or these with noise."""
        self.chosen: tuple[Ints, ...] = ()
        """Pool, index of the TP degree, width of the run in hand."""

    def keep(self, rows: Ints) -> None:
        """These rows, a row as often as it is named."""
        self.rolling = replace(self.rolling.take(rows), alike=np.arange(len(rows)))
        self.point = Point(self.rolling, (self.point, rows))
        self.chances, self.ranks = self.chances[rows], self.ranks[rows]
        self.chosen = tuple(column[rows] for column in self.chosen)

    def extend(self, head: Head) -> Ints:
        """The best choices of all rows together; the option of each of the new rows."""
        decision = self.point.decision(head, *self.chosen)
        chances = self.chances[:, None] + self._log_chances(self.network(decision), decision.mask)
        ranks = chances if self.noise is None else self._noisy(chances, self.noise.generator)
        flat = ranks.ravel()
        best = np.argsort(-flat, kind="stable")[: self.size]
        best = best[np.isfinite(flat[best])]
        rows, options = np.divmod(best, ranks.shape[1])
        self.keep(rows)
        self.chances, self.ranks = chances.ravel()[best], flat[best]
        return np.asarray(options, np.int64)

    def _log_chances(self, logits: NDArray[np.float32], mask: NDArray[np.bool_]) -> Reals:
        warm = logits.astype(float) / (self.noise.temperature if self.noise else 1.0)
        warm = np.where(mask, warm - warm.max(axis=1, keepdims=True), -np.inf)
        return np.asarray(warm - np.log(np.exp(warm).sum(axis=1, keepdims=True)))

    def _noisy(self, chances: Reals, generator: np.random.Generator) -> Reals:
        """``[A, C]``: noise whose largest value in each row is the row's own rank.

        In the form that subtracts no large numbers from each other (appendix B.3 there).
        """
        drawn = chances + generator.gumbel(size=chances.shape)
        largest = drawn.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            v = self.ranks[:, None] - drawn + np.log1p(-np.exp(drawn - largest))
            ranks = self.ranks[:, None] - np.maximum(v, 0) - np.log1p(np.exp(-np.abs(v)))
        return np.where(np.isfinite(chances), ranks, -np.inf)

    def add_run(self) -> None:
        """One more run of each row."""
        self.chosen, self.point = (), Point(self.rolling)
        for head in (Head.POOL, Head.TP, Head.WIDTH):
            option = self.extend(head)
            value = np.asarray(WIDTHS)[option] if head is Head.WIDTH else option
            self.chosen = *self.chosen, value
        length = 1 + self.extend(Head.LENGTH)
        pool, tp, width = self.chosen
        progress = self.rolling.progress
        progress.place(self.rolling.site, np.arange(len(length)), pool, tp, width, length)
