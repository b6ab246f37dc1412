"""Rollouts on record: what a chooser saw and chose, so that a network can learn from it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..policy.decision import Chooser, Decision

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Recorder:
    """A chooser that remembers what another one was asked and what it answered."""

    choose: Chooser
    decisions: list[Decision] = field(default_factory=list)
    choices: list[Ints] = field(default_factory=list)
    """``[A]`` of each."""

    def __call__(self, decision: Decision) -> Ints:
        """The other one's choice."""
        chosen = self.choose(decision)
        self.decisions.append(decision)
        self.choices.append(chosen)
        return chosen

    def __iter__(self) -> Iterator[tuple[Decision, Ints]]:
        return zip(self.decisions, self.choices, strict=True)
