"""Imitation: the policy learns to say what long searches found, decision by decision."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..policy.decision import Head
from ..policy.policy import Policy
from .context import Context, Stage
from .examples import Examples, Kind, batches
from .learner import Learner
from .network import log_chances


def cross_entropy(learner: Learner, kind: Kind, examples: Examples) -> Tensor:
    """Sum over decisions of the weighted cross-entropy."""
    target = torch.from_numpy(examples.target)
    return -(target * log_chances(learner, kind, examples)).sum()


def imitate(learner: Learner, examples: Mapping[Kind, Examples], size: int, seed: tuple[int, ...]) -> float:
    """One pass over all examples; the mean loss of a decision on the way."""
    total = weight = 0.0
    for batch in batches(examples, size, np.random.default_rng(seed)):
        loss = torch.stack([cross_entropy(learner, kind, rows) for kind, rows in batch]).sum()
        rows_weight = float(sum(rows.target.sum() for _, rows in batch))
        learner.step(learner.gradient(loss / rows_weight))
        total += loss.item()
        weight += rows_weight
    return total / max(weight, 1e-12)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well the policy says what it is to say."""

    loss: float
    """Mean cross-entropy of a decision."""
    top: float
    """Part of the decisions whose likeliest option has weight."""
    of_head: Mapping[Head, tuple[float, float]]
    """The same by head."""

    @property
    def figures(self) -> dict[str, float]:
        """For the curves."""
        found = {"validation_loss": self.loss, "validation_top": self.top}
        for head, (loss, top) in self.of_head.items():
            found |= {f"validation_loss_{head}": loss, f"validation_top_{head}": top}
        return found


def fit(learner: Learner, examples: Mapping[Kind, Examples], size: int = 4096) -> Fit:
    """On examples that nothing is learned from."""
    sums: dict[Head, list[float]] = {}
    with torch.no_grad():
        for kind, rows in examples.items():
            for at in range(0, len(rows), size):
                part = rows.take(np.arange(at, min(at + size, len(rows))))
                sums.setdefault(kind.head, [0.0, 0.0, 0.0])
                for i, value in enumerate(_sums(learner, kind, part)):
                    sums[kind.head][i] += value
    of_head = {head: (loss / max(w, 1e-12), top / max(w, 1e-12)) for head, (loss, top, w) in sums.items()}
    weight = max(sum(w for _, _, w in sums.values()), 1e-12)
    return Fit(
        sum(loss for loss, _, _ in sums.values()) / weight,
        sum(top for _, top, _ in sums.values()) / weight,
        of_head,
    )


def _sums(learner: Learner, kind: Kind, examples: Examples) -> tuple[float, float, float]:
    """Loss, weight of decisions whose likeliest option has weight, weight of all."""
    chances = log_chances(learner, kind, examples)
    target = torch.from_numpy(examples.target)
    allowed = torch.where(torch.from_numpy(examples.mask), chances, torch.tensor(-torch.inf))
    weight = target.sum(dim=1)
    hit = target.gather(1, allowed.argmax(dim=1, keepdim=True))[:, 0] > 0
    return -(target * chances).sum().item(), (weight * hit).sum().item(), weight.sum().item()


def learn_to_imitate(
    context: Context, policy: Policy, training: Mapping[Kind, Examples], validation: Mapping[Kind, Examples]
) -> Policy:
    """All passes of the recipe, from where an earlier run stopped; the policy that validates best.

    A pass depends on the seed and its number only, so a run that was killed ends as if it had not been.
    """
    recipe, stage = context.recipe, Stage.IMITATION
    learner = Learner(policy.parameters, recipe.learning_rate, recipe.decay)
    path, best_path = context.folder / "imitation.npz", context.folder / "imitation-best.npz"
    if path.exists():
        more = learner.load(path)
        done, best = int(more["done"]), float(more["best"])
    else:
        start = fit(learner, validation)
        context.curves.add(stage, 0, start.figures)
        done, best = 0, start.loss
        policy.save(best_path)
    for number in range(done + 1, recipe.passes + 1):
        learner.set_rate(recipe.learning_rate * 0.5 * (1 + np.cos(np.pi * (number - 1) / recipe.passes)))
        loss = imitate(learner, training, recipe.batch, (recipe.seed, number))
        found = fit(learner, validation)
        context.curves.add(stage, number, {"training_loss": loss, **found.figures})
        if found.loss < best:
            best = found.loss
            replace(policy, parameters=learner.arrays).save(best_path)
        learner.save(path, done=np.array(number), best=np.array(best))
        context.tell(stage, number, recipe.passes, f"validation loss {found.loss:.3f}")
    return Policy.load(best_path)
