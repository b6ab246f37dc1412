"""Decisions as arrays: what was seen, and how much weight each option has, sorted by what fits one batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..policy.choosers import forced
from ..policy.decision import Decision, Head
from ..policy.roll import roll
from ..policy.site import Site
from .labels import TemplateSequence
from .record import Recorder

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Kind(NamedTuple):
    """Decisions that are stored alike."""

    head: Head
    pools: int
    """In sites with up to so many, a power of four."""
    options: int
    """With up to so many, a power of four."""


CHUNK = 64
"""Examples of one kind computed at once: fewer waste time on calls, more crowd out the other kinds."""


@dataclass(frozen=True, slots=True)
class Examples:
    """N decisions of one kind with up to C options."""

    pools: Floats
    """``[N, P, FP]``"""
    there: Bools
    """``[N, P]``: which pools are no padding."""
    overall: Floats
    """``[N, FG]``"""
    options: Floats
    """``[N, C, FH]``"""
    mask: Bools
    """``[N, C]``: options that are allowed."""
    chosen_pool: Ints
    """``[N]``: -1 before the pool of a run is chosen."""
    target: Floats
    """``[N, C]``: weight of each option; the sum of a row is the weight of the decision."""

    def __len__(self) -> int:
        return len(self.target)

    def take(self, index: Ints) -> "Examples":
        """Some of them."""
        return Examples(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence["Examples"]) -> "Examples":
        """All of them, one behind the other."""
        pools = max(part.pools.shape[1] for part in parts)
        options = max(part.mask.shape[1] for part in parts)
        padded = [part._sized(pools, options) for part in parts]
        return cls(*(np.concatenate([getattr(p, f.name) for p in padded]) for f in fields(cls)))

    @classmethod
    def of(cls, decision: Decision, rows: Ints, target: Floats) -> "Examples":
        """Some rows of a decision."""
        return cls(
            decision.pools[rows],
            np.ones((len(rows), decision.pools.shape[1]), bool),
            decision.overall[rows],
            decision.options[rows],
            decision.mask[rows],
            decision.chosen_pool[rows],
            target,
        )

    def _sized(self, pools: int, options: int) -> "Examples":
        """With room for so many pools and options."""
        more, wide = pools - self.pools.shape[1], options - self.mask.shape[1]
        return Examples(
            np.pad(self.pools, ((0, 0), (0, more), (0, 0))),
            np.pad(self.there, ((0, 0), (0, more))),
            self.overall,
            np.pad(self.options, ((0, 0), (0, wide), (0, 0))),
            np.pad(self.mask, ((0, 0), (0, wide))),
            self.chosen_pool,
            np.pad(self.target, ((0, 0), (0, wide))),
        )


def kind_of(decision: Decision) -> Kind:
    """What it can share a batch with."""
    pools, options = decision.pools.shape[1], decision.mask.shape[1]
    return Kind(decision.head, _room(pools), _room(options))


def _room(number: int) -> int:
    """The next power of four: few kinds waste no time on calls, and padding costs less than that."""
    return 1 << 2 * (((number - 1).bit_length() + 1) // 2)


def joined(parts: Iterable[tuple[Kind, Examples]]) -> dict[Kind, Examples]:
    """All examples by kind, kinds in order."""
    found: dict[Kind, list[Examples]] = {}
    for kind, part in parts:
        if len(part):
            found.setdefault(kind, []).append(part)
    return {kind: Examples.joined(found[kind]) for kind in sorted(found)}


def examples_of(
    site: Site, sequences: Sequence[TemplateSequence], weights: Sequence[float]
) -> Iterator[tuple[Kind, Examples]]:
    """What to choose at each decision on the way to each sequence.

    Sequences that start alike share their first decisions: there the options have the weights of all the
    sequences that take them, so the loss is that of the weighted sequences, computed once for each decision.
    """
    if not sequences:
        return
    replay = Recorder(forced(site, sequences))
    roll(site, len(sequences), replay)
    history = [0] * len(sequences)
    numbers: dict[tuple[int, int], int] = {}
    share = np.asarray(weights, np.float32)
    for decision, choice in replay:
        yield kind_of(decision), _merged(decision, choice, history, share)
        for rollout, option in zip(decision.active.tolist(), choice.tolist(), strict=True):
            history[rollout] = numbers.setdefault((history[rollout], option), len(numbers) + 1)


def _merged(decision: Decision, choice: Ints, history: Sequence[int], share: Floats) -> Examples:
    """One example for each different history that leaves a choice."""
    past = np.array([history[r] for r in decision.active.tolist()], np.int64)
    _, first, row = np.unique(past, return_index=True, return_inverse=True)
    target = np.zeros((len(first), decision.mask.shape[1]), np.float32)
    np.add.at(target, (row.ravel(), choice), share[decision.active])
    kept = leaves_a_choice(decision)[first]
    return Examples.of(decision, first[kept], target[kept])


def leaves_a_choice(decision: Decision) -> Bools:
    """``[A]``: whether more than one option is allowed; of others nothing can be learned."""
    return np.asarray(decision.mask.sum(axis=1) > 1)


def batches(
    examples: Mapping[Kind, Examples], size: int, generator: np.random.Generator
) -> Iterator[list[tuple[Kind, Examples]]]:
    """Every example once, in random order, about ``size`` of all kinds together."""
    chunks: list[tuple[Kind, Ints]] = []
    for kind, rows in examples.items():
        order = generator.permutation(len(rows))
        chunks += [(kind, order[at : at + CHUNK]) for at in range(0, len(rows), CHUNK)]
    batch: list[tuple[Kind, Examples]] = []
    for k in generator.permutation(len(chunks)):
        kind, index = chunks[k]
        batch.append((kind, examples[kind].take(index)))
        if sum(len(rows) for _, rows in batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch
