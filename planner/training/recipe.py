"""What a training run does: how many problems, how long, how fast; the same recipe gives the same weights."""

import msgspec

from .labelling import Effort
from .labels import Space

SHORT = Effort(enumerated=500, rounds=0, patience=0, priced=2, numbered=0, kept=500, mixtures=0, every=200)
"""Of the search for labels of the small recipe."""


class Exploration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How groups of rollouts are drawn, and what their loss is made of."""

    rollouts: int = 32
    """Of one group."""
    forced_depth: tuple[float, float] = (0.8, 0.25)
    """Part of rollouts with a random first depth, at the start and at the end (arXiv 2609.34244)."""
    best_of: int = 8
    """What a rollout is credited with, see ``advantages``; 1: its own reward."""
    entropy: float = 0.003
    """Weight of the entropy of each decision."""
    imitation: float = 0.3
    """Weight of the cross-entropy of the best sequences of each depth."""
    passes: int = 2
    """Steps along each group."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All numbers of a training run."""

    name: str
    seed: int = 0
    problems: int
    """Random problems that a long search labels."""
    effort: Effort = Effort()
    """Of that search."""
    validation: int
    """Problems that nothing is learned from; a long search labels them."""
    choosing: int
    """Of these, how many choose between weights; the others give the figures of the card."""
    most_devices: int = 1024
    """Of a random cluster."""
    processes: int = 2
    """That label at once."""
    passes: int
    """Over all examples, in imitation."""
    batch: int = 512
    """Decisions of one step of imitation."""
    learning_rate: float = 2e-3
    """Of imitation at its start; it falls to nothing along half a cosine."""
    decay: float = 0.01
    """Weight decay of imitation (AdamW, arXiv 1711.05101)."""
    updates: int
    """Of the policy gradient."""
    update_rate: float = 3e-4
    """Learning rate of the policy gradient."""
    group_problems: int = 4
    """Problems of an update, whose gradients are kept apart."""
    check_every: int = 40
    """Updates between two validations."""
    exploration: Exploration = Exploration()
    evaluations: tuple[int, ...] = (10, 30, 100)
    """Proposals after which a policy is judged; while weights are chosen, all but the last number."""

    @property
    def space(self) -> Space:
        """How large problems are."""
        return Space(devices=(2, self.most_devices))

    @classmethod
    def standard(cls, seed: int = 0) -> "Recipe":
        """That of the weights that are shipped."""
        return cls(
            name="standard",
            seed=seed,
            problems=4200,
            validation=68,
            choosing=24,
            passes=6,
            updates=240,
        )

    @classmethod
    def small(cls, seed: int = 0) -> "Recipe":
        """A minute: it learns something, not much."""
        return cls(
            name="small",
            seed=seed,
            problems=40,
            effort=SHORT,
            validation=20,
            choosing=8,
            most_devices=16,
            processes=1,
            passes=14,
            batch=128,
            updates=4,
            check_every=2,
            group_problems=2,
            exploration=Exploration(rollouts=16),
            evaluations=(5, 20),
        )

    @classmethod
    def tuning(cls, seed: int = 0, *, small: bool = False) -> "Recipe":
        """For one model on parts of few clusters, from weights that know others: minutes, or one."""
        return cls(
            name="small tuning" if small else "tuning",
            seed=seed,
            problems=8 if small else 64,
            effort=SHORT if small else Effort(),
            validation=8 if small else 24,
            choosing=4 if small else 12,
            processes=1,
            passes=4 if small else 12,
            batch=128,
            learning_rate=5e-4,
            updates=0,
        )
