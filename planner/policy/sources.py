"""Sources of the search: the learned policy, and the same loop with uniform choices, its baseline."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..search.batch import Templates
from ..search.columns import Completion
from ..search.sand import best_numbers
from ..search.shapes import Shapes, StageShape, expanded
from .beam import Noise, beam_search
from .choosers import Network, Sampler, Uniform
from .policy import Policy
from .roll import roll
from .site import Site

WHOLE = 0.25
"""Whole rollouts beside each first template of a batch: of labels one in forty has a second template, and a
rollout takes twice as long."""


MOST_AT_ONCE = 32
"""Shapes that get their numbers at once: with experts some 60 templates each, 20 ms of one core together."""

NUMBERS = 2
"""Copies with a micro-batch and a tiling of experts that each shape gets."""


class _OfShapes(ABC):
    """A source that proposes shapes; their numbers are computed."""

    __slots__ = ()

    ranked: bool
    """Whether sand tells which numbers, and which shapes first; else every number, in the order of choice."""

    @abstractmethod
    def shapes(self, site: Site, seed: int) -> Iterator[Shapes]:
        """Batches of what it proposes, no shape twice."""

    def batches(self, completion: Completion, seed: int) -> Iterator[Templates]:
        """With promising numbers; the same for the same seed."""
        site = Site.of(completion.request, completion.supply)
        for shapes in _in_pieces(self.shapes(site, seed)):
            templates, origin = expanded(completion, shapes)
            if self.ranked:
                templates = templates.take(best_numbers(completion, templates, origin, NUMBERS))
            if len(templates):
                yield templates


@dataclass(frozen=True, slots=True)
class Learned(_OfShapes):
    """Proposes what the policy thinks likely: first a beam, then samples at rising temperature.

    Samples are unlike first templates, and some whole rollouts: later templates are of what others leave.
    """

    policy: Policy
    rollouts: int = 64
    """Samples of a batch."""
    beam: int = 16
    """Likeliest shapes of the first batch; 0: none."""
    temperatures: tuple[float, ...] = (1.0, 1.5)
    """Of each batch of samples."""
    masked: bool = True
    """Without masks, samples are whole rollouts, what can't be built is dropped, and there is no beam."""
    ranked: bool = True
    name: str = "policy"

    def shapes(self, site: Site, seed: int) -> Iterator[Shapes]:
        """The same as shapes, none twice."""
        return _fresh(self._proposed(site, seed))

    def _proposed(self, site: Site, seed: int) -> Iterator[Shapes]:
        network = Network(self.policy.parameters)
        if self.beam and self.masked:
            yield beam_search(site, network, self.beam)
        generator = np.random.default_rng(seed)
        for temperature in self.temperatures:
            sampler = Sampler(network, generator, temperature)
            if self.masked:
                yield beam_search(site, network, self.rollouts, Noise(generator, temperature))
                yield roll(site, max(1, int(WHOLE * self.rollouts)), sampler).shapes
            else:
                yield roll(site, self.rollouts, sampler, masked=False).shapes


@dataclass(frozen=True, slots=True)
class UniformRandom(_OfShapes):
    """Proposes anything that can be built."""

    rollouts: int = 64
    """Of each batch."""
    num_batches: int = 2
    ranked: bool = False
    name: str = "uniform random"

    def shapes(self, site: Site, seed: int) -> Iterator[Shapes]:
        """The same as shapes, none twice."""
        chooser = Uniform(np.random.default_rng(seed))
        rolls = (roll(site, self.rollouts, chooser) for _ in range(self.num_batches))
        return _fresh(rollouts.shapes for rollouts in rolls)


def _in_pieces(batches: Iterator[Shapes]) -> Iterator[Shapes]:
    """The same in small batches, so that a search may look at its clock between them."""
    for batch in batches:
        for start in range(0, len(batch), MOST_AT_ONCE):
            yield batch.take(np.arange(start, min(start + MOST_AT_ONCE, len(batch))))


def _fresh(batches: Iterator[Shapes]) -> Iterator[Shapes]:
    """Without those that were there before; no batch is empty."""
    known: set[tuple[StageShape, ...]] = set()
    for batch in batches:
        kept = []
        for k in range(len(batch)):
            key = batch.stages(k)
            if key not in known:
                known.add(key)
                kept.append(k)
        if kept:
            yield batch.take(np.array(kept, np.int64))
