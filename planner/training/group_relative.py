"""The group-relative clipped policy gradient: rollouts are judged against the others on the same problem."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..policy.choosers import Network
from ..policy.roll import roll
from .advantage import advantages, rewards_of
from .buffer import Buffer
from .examples import Examples, Kind, examples_of, joined, kind_of, leaves_a_choice
from .explore import Exploring
from .imitation import cross_entropy
from .labels import TemplateSequence
from .learner import Learner
from .network import log_chances
from .problem import Problem
from .recipe import Exploration
from .record import Recorder
from .reward import reward

Floats = NDArray[np.float64]

CLIP = 0.2
"""A step does not pay for moving a chance by more than this part of it (PPO, arXiv 1707.06347)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one problem as examples, whose choice has weight 1."""

    parts: dict[Kind, Examples]
    advantage: dict[Kind, Tensor]
    """``[N]``: 0 where the choice was not the policy's own."""
    before: dict[Kind, Tensor]
    """``[N]``: logarithm of the chance of the choice when it was made."""
    best: dict[Kind, Examples]
    """The best sequences known of each depth."""
    num: int
    rewards: Floats
    """``[num]``"""
    fits: float
    """Part of the rollouts that fit."""


def update(
    learner: Learner,
    problems: Sequence[Problem],
    buffer: Buffer,
    how: Exploration,
    part: float,
    seed: tuple[int, ...],
) -> dict[str, float]:
    """One group of each problem and ``passes`` steps along what they say; figures for the curves.

    ``part``: of the training that is done.
    """
    first, last = how.forced_depth
    forced = first + (last - first) * part
    groups = [
        group_of(learner, problem, buffer, how, forced, np.random.default_rng((*seed, i)))
        for i, problem in enumerate(problems)
    ]
    for _ in range(how.passes):
        gradients = [learner.gradient(loss_of(learner, group, how)) for group in groups]
        learner.step(apart(gradients))
    every = np.concatenate([group.rewards for group in groups])
    return {
        "mean_reward": float(every.mean()),
        "fits": float(np.mean([group.fits for group in groups])),
        "forced_depth": forced,
    }


def group_of(
    learner: Learner,
    problem: Problem,
    buffer: Buffer,
    how: Exploration,
    forced_depth: float,
    generator: np.random.Generator,
) -> Group:
    """Rolled, rewarded, and written to the buffer where better than what is known."""
    exploring = Exploring(Network(learner.arrays), generator, forced_depth)
    record = Recorder(exploring)
    rollouts = roll(problem.site, how.rollouts, record)
    throughput = reward(problem.completion, rollouts)
    rewards = rewards_of(throughput)
    buffer.add(problem.seed, rollouts, throughput)
    parts = joined(_rows(record))
    credit = advantages(rewards, how.best_of)
    values = _joined_values(record, exploring, credit)
    with torch.no_grad():
        before = {kind: _chance(learner, kind, rows) for kind, rows in parts.items()}
    sequences, weights = _sayable(problem, *buffer.best(problem.seed))
    return Group(
        parts,
        values,
        before,
        joined(examples_of(problem.site, sequences, weights)),
        rollouts.num,
        rewards,
        fits=float((throughput > 0).mean()),
    )


def _sayable(
    problem: Problem, sequences: Sequence[TemplateSequence], weights: Sequence[float]
) -> tuple[list[TemplateSequence], list[float]]:
    """Runs that were sampled apart and are one in the buffer cannot always be chosen as one."""
    kept = [k for k, sequence in enumerate(sequences) if problem.can_say(sequence)]
    return [sequences[k] for k in kept], [weights[k] for k in kept]


def loss_of(learner: Learner, group: Group, how: Exploration) -> Tensor:
    """Clipped surrogate, entropy and imitation of one group, a rollout on average."""
    total = torch.zeros(())
    for kind, rows in group.parts.items():
        chances = log_chances(learner, kind, rows)
        own = (torch.from_numpy(rows.target) * chances).sum(dim=1)
        ratio, credit = torch.exp(own - group.before[kind]), group.advantage[kind]
        gain = torch.minimum(ratio * credit, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * credit)
        spread = -(torch.exp(chances) * torch.from_numpy(rows.mask) * chances).sum(dim=1)
        total = total - (gain + how.entropy * spread).sum() / group.num
    for kind, rows in group.best.items():
        total = total + how.imitation * cross_entropy(learner, kind, rows)
    return total


def apart(gradients: Sequence[Tensor]) -> Tensor:
    """The mean of gradients of several problems, each without what conflicts with another one.

    Gradient surgery (arXiv 2001.06782), in the order given.
    """
    found = []
    for i, gradient in enumerate(gradients):
        own = gradient
        for j, other in enumerate(gradients):
            along = torch.dot(own, other)
            if i != j and along < 0:
                own = own - along / (other.dot(other) + 1e-12) * other
        found.append(own)
    return torch.stack(found).mean(dim=0)


def _rows(record: Recorder) -> Iterator[tuple[Kind, Examples]]:
    for decision, choice in record:
        rows = np.nonzero(leaves_a_choice(decision))[0]
        target = np.zeros((len(rows), decision.mask.shape[1]), np.float32)
        target[np.arange(len(rows)), choice[rows]] = 1
        yield kind_of(decision), Examples.of(decision, rows, target)


def _joined_values(record: Recorder, exploring: Exploring, credit: Floats) -> dict[Kind, Tensor]:
    """Advantages in the order of ``_rows``."""
    found: dict[Kind, list[Floats]] = {}
    for decision, own in zip(record.decisions, exploring.own, strict=True):
        values = np.where(own, credit[decision.active], 0.0)[leaves_a_choice(decision)]
        found.setdefault(kind_of(decision), []).append(values)
    return {kind: torch.from_numpy(np.concatenate(v).astype(np.float32)) for kind, v in found.items()}


def _chance(learner: Learner, kind: Kind, rows: Examples) -> Tensor:
    return (torch.from_numpy(rows.target) * log_chances(learner, kind, rows)).sum(dim=1)
