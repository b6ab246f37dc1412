"""Policy gradient from imitation on, kept only where proposals for problems it never saw get better."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..policy.policy import Policy
from ..policy.sources import Learned
from .buffer import Buffer
from .context import Context, Stage
from .group_relative import update
from .learner import Learner
from .problem import Problem
from .reward import reward
from .validate import BEAM, standing

LEAST_GAIN = 0.0005
"""In the mean logarithm of seconds: a smaller gain over imitation is chance, the simpler weights are kept."""


def judged(context: Context, policy: Policy, problems: Sequence[Problem]) -> dict[str, float]:
    """Mean logarithm of seconds over the best known after each number of proposals, and the mean of those."""
    evaluations = context.recipe.evaluations[:-1]
    found = standing(Learned(policy, beam=BEAM), problems, evaluations, context.recipe.seed)
    return {**found.figures, "lost": float(found.mean.mean())}


def improve(
    context: Context, policy: Policy, training: Sequence[Problem], choosing: Sequence[Problem]
) -> tuple[Policy, bool]:
    """The best policy by validation, and whether it is the policy gradient's.

    As in imitation, a run that was killed goes on from the last check and ends as if it had not been.
    """
    recipe, stage = context.recipe, Stage.POLICY_GRADIENT
    if not recipe.updates:
        return policy, False
    learner, buffer = Learner(policy.parameters, recipe.update_rate), Buffer()
    path, best_path = context.folder / "policy-gradient.npz", context.folder / "policy-gradient-best.npz"
    done, kept = 0, False
    if path.exists():
        more = learner.load(path)
        done, best, kept = int(more["done"]), float(more["best"]), bool(more["kept"])
        buffer = Buffer.decoded(more["buffer"].tobytes())
    else:
        start = judged(context, policy, choosing)
        context.curves.add(stage, 0, start)
        best = start["lost"] - LEAST_GAIN
        policy.save(best_path)
    for number in range(done + 1, recipe.updates + 1):
        chosen = _chosen(recipe.seed, number, recipe.group_problems, len(training))
        problems = [training[k] for k in chosen]
        _know_labels(buffer, problems)
        figures = update(
            learner, problems, buffer, recipe.exploration, number / recipe.updates, (recipe.seed, number)
        )
        context.tell(stage, number, recipe.updates, f"mean reward {figures['mean_reward']:.3f}")
        if number % recipe.check_every and number != recipe.updates:
            continue
        now = replace(policy, parameters=learner.arrays)
        found = judged(context, now, choosing)
        context.curves.add(stage, number, {**figures, **found})
        if found["lost"] < best:
            best, kept = found["lost"], True
            now.save(best_path)
        held = np.frombuffer(buffer.encoded(), np.uint8)
        learner.save(path, done=np.array(number), best=np.array(best), kept=np.array(kept), buffer=held)
    return Policy.load(best_path), kept


def _know_labels(buffer: Buffer, problems: Sequence[Problem]) -> None:
    """What long searches found is there from the start."""
    for problem in problems:
        if problem.lessons and not buffer.knows(problem.seed):
            labelled = problem.rollouts([sequence for sequence, _ in problem.lessons])
            buffer.add(problem.seed, labelled, reward(problem.completion, labelled))


def _chosen(seed: int, number: int, size: int, num_problems: int) -> list[int]:
    """Problems of one update: every one once in ``num_problems / size`` updates."""
    each = max(1, num_problems // size)
    turn, at = divmod(number - 1, each)
    order = np.random.default_rng((seed, 1, turn)).permutation(num_problems)
    return [int(k) for k in order[at * size : (at + 1) * size]]
