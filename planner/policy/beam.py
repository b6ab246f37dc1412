"""The likeliest templates by a network: a beam over decisions, all of whose rows stand at the same head."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..search.shapes import Shapes
from .choosers import Network
from .decision import WIDTHS, Head, Ints
from .point import Point, Rolling
from .roll import shapes_of_stages
from .site import Site

Reals = NDArray[np.float64]


def beam_search(site: Site, network: Network, size: int) -> Shapes:
    """At most ``size`` first templates, likeliest first."""
    beam = _Beam(network, size, Rolling.of(site, 1))
    depth = beam.extend(Head.DEPTH)
    beam.rolling.progress.begin(np.arange(len(depth)), depth)
    stages: list[Ints] = []
    chances: list[Reals] = []
    while len(beam.rolling):
        beam.add_run()
        done = beam.rolling.progress.stages_left == 0
        stages.append(beam.rolling.progress.stages[done])
        chances.append(beam.chances[done])
        # what goes on only gets less likely: behind as many finished ones it is left
        finished = np.sort(np.concatenate(chances))[::-1]
        least = finished[size - 1] if len(finished) >= size else -np.inf
        beam.keep(np.nonzero(~done & (beam.chances > least))[0])
    order = np.argsort(-np.concatenate(chances), kind="stable")[:size]
    return shapes_of_stages(np.concatenate(stages)[order]).primitive().distinct()


class _Beam:
    """Rows with their likelihoods; each is a rollout."""

    def __init__(self, network: Network, size: int, rolling: Rolling) -> None:
        self.network = network
        self.size = size
        self.rolling = rolling
        self.chances: Reals = np.zeros(len(rolling))
        """Logarithm of the probability of each row's choices so far."""
        self.chosen: tuple[Ints, ...] = ()
        """Pool, index of the TP degree, width of the run in hand."""

    def keep(self, rows: Ints) -> None:
        """These rows, a row as often as it is named."""
        self.rolling = replace(self.rolling.take(rows), alike=np.arange(len(rows)))
        self.chances = self.chances[rows]
        self.chosen = tuple(column[rows] for column in self.chosen)

    def extend(self, head: Head) -> Ints:
        """The likeliest choices of all rows together; the option of each of the new rows."""
        decision = Point(self.rolling).decision(head, *self.chosen)
        logits = np.where(decision.mask, self.network(decision), -np.inf).astype(float)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total = (self.chances[:, None] + logits).ravel()
        best = np.argsort(-total, kind="stable")[: self.size]
        best = best[np.isfinite(total[best])]
        rows, options = np.divmod(best, logits.shape[1])
        self.keep(rows)
        self.chances = total[best]
        return np.asarray(options, np.int64)

    def add_run(self) -> None:
        """One more run of each row."""
        self.chosen = ()
        for head in (Head.POOL, Head.TP, Head.WIDTH):
            option = self.extend(head)
            value = np.asarray(WIDTHS)[option] if head is Head.WIDTH else option
            self.chosen = *self.chosen, value
        length = 1 + self.extend(Head.LENGTH)
        pool, tp, width = self.chosen
        progress = self.rolling.progress
        progress.place(self.rolling.site, np.arange(len(length)), pool, tp, width, length)
