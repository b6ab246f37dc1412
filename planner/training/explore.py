"""Rollouts that look beyond what the policy would choose: depths at random, and one with types at random."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..policy.choosers import Network
from ..policy.decision import Decision, Head

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNIFORM_ROLLOUT = 0
"""The rollout of each group whose pools are drawn uniformly (arXiv 2609.34244: one a group)."""


@dataclass(slots=True)
class Exploring:
    """Samples from a policy, but for some choices; says afterwards which were the policy's own."""

    network: Network
    generator: np.random.Generator
    forced_depth: float
    """Part of the rollouts whose first depth is drawn uniformly."""
    own: list[Bools] = field(default_factory=list)
    """``[A]`` of each decision."""

    def __call__(self, decision: Decision) -> Ints:
        """From the policy, or any allowed option."""
        logits = self.network(decision)
        draws = self.generator.gumbel(size=logits.shape)
        free = self._free(decision)
        self.own.append(~free)
        scores = np.where(free[:, None], draws, logits + draws)
        return np.asarray(np.where(decision.mask, scores, -np.inf).argmax(axis=1), np.int64)

    def _free(self, decision: Decision) -> Bools:
        """``[A]``: whose option is drawn uniformly."""
        if decision.head is Head.DEPTH and not self.own:
            return np.asarray(self.generator.random(len(decision.active)) < self.forced_depth)
        if decision.head is Head.POOL:
            return np.asarray(decision.active == UNIFORM_ROLLOUT)
        return np.zeros(len(decision.active), bool)
