"""Ways to choose: as a network says, uniformly, or as labels have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.errors import UsageError

from .decision import MOST_STAGES, WIDTHS, Chooser, Decision, Floats, Head, Ints, Seen
from .network import FORBIDDEN, Encoded, encode, scores
from .site import Site

RunOfStages: TypeAlias = tuple[int, int, int, int]
"""Pool, TP degree, width and number of alike neighbouring stages."""

Sequences: TypeAlias = Sequence[Sequence[Sequence[RunOfStages]]]
"""By rollout and template: its runs."""


class Network:
    """Logits of decisions; what several decisions or rollouts share is computed once."""

    def __init__(self, parameters: Mapping[str, Floats]) -> None:
        self.parameters = parameters
        self._seen: Seen | None = None
        self._encoded: Encoded | None = None

    def __call__(self, decision: Decision) -> Floats:
        """``[A, C]``; 0 where nothing is to be chosen."""
        mask = decision.mask[decision.first]
        found: Floats = np.where(mask, np.float32(0), np.float32(FORBIDDEN))
        free = np.nonzero(mask.sum(axis=1) > 1)[0]
        if not len(free):
            return found[decision.same]
        seen = decision.seen
        if self._seen is not seen or self._encoded is None:
            self._seen, self._encoded = seen, encode(self.parameters, seen.pools, seen.overall, np)
        found[free] = scores(
            self.parameters,
            decision.head,
            self._encoded.take(decision.rows[decision.first[free]]),
            decision.unlike_options[free],
            mask[free],
            decision.chosen_pool[decision.first[free]],
            np,
        )
        return found[decision.same]


@dataclass(slots=True)
class Sampler:
    """Samples as a network says; without a generator it takes the likeliest."""

    network: Network
    generator: np.random.Generator | None = None
    temperature: float = 1.0
    """Above 1: nearer to uniform choice."""

    def __call__(self, decision: Decision) -> Ints:
        """By the largest of logits with Gumbel noise."""
        logits: NDArray[np.floating] = self.network(decision)
        if self.generator is not None:
            noise = self.generator.gumbel(size=logits.shape)
            logits = np.where(decision.mask, logits / self.temperature + noise, -np.inf)
        return np.asarray(logits.argmax(axis=1), np.int64)


@dataclass(slots=True)
class Uniform:
    """Any allowed option, each as likely; it needs no features."""

    generator: np.random.Generator

    def __call__(self, decision: Decision) -> Ints:
        """The allowed option with the largest random number."""
        drawn = np.where(decision.mask, self.generator.random(decision.mask.shape), -1.0)
        return np.asarray(drawn.argmax(axis=1), np.int64)


@dataclass(slots=True)
class _Forced:
    site: Site
    sequences: Sequences
    option_of: dict[Head, dict[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        values: dict[Head, Sequence[int]] = {
            Head.DEPTH: range(MOST_STAGES + 1),
            Head.POOL: range(self.site.num_pools),
            Head.TP: self.site.degrees,
            Head.WIDTH: WIDTHS,
            Head.LENGTH: range(1, MOST_STAGES + 1),
        }
        self.option_of = {head: {v: i for i, v in enumerate(row)} for head, row in values.items()}

    def __call__(self, decision: Decision) -> Ints:
        where = zip(decision.active.tolist(), decision.position.tolist(), decision.run.tolist(), strict=True)
        return np.array([self._option(decision, row, *at) for row, at in enumerate(where)], np.int64)

    def _option(self, decision: Decision, row: int, rollout: int, position: int, run: int) -> int:
        templates = self.sequences[rollout]
        wanted = _wanted(decision.head, templates[position] if position < len(templates) else (), run)
        option = self.option_of.get(decision.head, {}).get(wanted, -1)
        mask = decision.mask[row]
        if not (0 <= option < len(mask) and mask[option]):
            raise UsageError(
                f"template {position} of sequence {rollout}, run {run}: {decision.head} {wanted} is not "
                f"among what can be built there; leave the sequence out"
            )
        return option


def _wanted(head: Head, runs: Sequence[RunOfStages], run: int) -> int:
    """What a label says there."""
    if head is Head.DEPTH:
        return sum(length for *_, length in runs)
    pool, tp, width, length = runs[run]
    return {Head.POOL: pool, Head.TP: tp, Head.WIDTH: width, Head.LENGTH: length}[head]


def forced(site: Site, sequences: Sequences) -> Chooser:
    """Chooses what the sequences say, one for each rollout; UsageError where masks don't allow it."""
    return _Forced(site, sequences)
