"""Weights of the ablation's variants from a training run's folder: ``python -m bench.learned_variants RUN``.

Imitation alone and the policy gradient are in the folder; what has no FiLM learns to imitate there, from the
same labels with the same recipe.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from bench.learned_contestants import FILES, IMITATED, IMPROVED, PLAIN, WEIGHTS
from planner.policy import Architecture, Policy
from planner.training.context import Context
from planner.training.labels import ProblemSet, digest_of
from planner.training.learner import Learner
from planner.training.recipe import Recipe
from planner.training.run import labelled, learn


def make(run: Path, labels: Path, out: Path = WEIGHTS) -> None:
    """All three files; what is in the run's folder ``without-film`` already is not learned again."""
    recipe = msgspec.json.decode((run / "recipe.json").read_bytes(), type=Recipe)
    imitated = Policy.load(run / "imitation-best.npz")
    imitated.save(out / FILES[IMITATED])
    improved(run, imitated, recipe).save(out / FILES[IMPROVED])
    without_film(run, labels, recipe).save(out / FILES[PLAIN])


def without_film(run: Path, labels: Path, recipe: Recipe) -> Policy:
    """Learns to imitate, and nothing else."""
    imitation = structs.replace(recipe, updates=0)
    context = Context.at(imitation, run / "without-film", None, inputs=f"labels {digest_of(labels)}\n")
    training = labelled(context, ProblemSet.TRAINING, recipe.problems, labels)
    validation = labelled(context, ProblemSet.VALIDATION, recipe.validation, labels)
    first = Policy.new(recipe.seed, Architecture(film=False))
    trained = learn(context, first, training, validation, f"{len(training)} problems, imitation without FiLM")
    return Policy.load(trained.weights)


def improved(run: Path, imitated: Policy, recipe: Recipe) -> Policy:
    """The policy gradient's best weights; its last ones where none was better than imitation's."""
    learner = Learner(imitated.parameters, recipe.update_rate)
    if bool(learner.load(run / "policy-gradient.npz")["kept"]):
        return Policy.load(run / "policy-gradient-best.npz")
    return replace(imitated, parameters=learner.arrays)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.learned_variants")
    parser.add_argument("run", type=Path, help="folder that `arachne learn --out` has filled")
    parser.add_argument("--labels", type=Path, help="folder of its labels (default: in the run's)")
    given = parser.parse_args(arguments)
    make(given.run, given.labels or given.run / "labels")


if __name__ == "__main__":
    main()
