"""Weights of the ablation's variants, from the folder of a training run."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from bench import learned_variants
from bench.learned_contestants import FILES
from planner.policy import Policy
from planner.training.learner import Learner
from planner.training.recipe import Recipe


@pytest.mark.parametrize("kept", [False, True])
def test_variants_come_from_the_folder_of_a_training_run(tmp_path, monkeypatch, kept):
    run, recipe = tmp_path / "run", Recipe.small()
    imitated, best = Policy.new(1), Policy.new(2)
    imitated.save(run / "imitation-best.npz")
    best.save(run / "policy-gradient-best.npz")
    (run / "recipe.json").write_bytes(msgspec.json.encode(recipe))
    Learner(Policy.new(3).parameters, 1e-3).save(run / "policy-gradient.npz", kept=np.array(kept))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "labels.jsonl").touch()
    asked = []

    def trained(context, first, *_):
        asked.append((context.recipe.updates, context.folder.name, first.meta.architecture.film))
        first.save(context.folder / "policy.npz")
        return SimpleNamespace(weights=context.folder / "policy.npz")

    monkeypatch.setattr(learned_variants, "learn", trained)
    monkeypatch.setattr(learned_variants, "labelled", lambda *words: [words])
    learned_variants.make(run, tmp_path / "labels", tmp_path / "out")
    assert asked == [(0, "without-film", False)]
    found = {name: Policy.load(tmp_path / "out" / file) for name, file in FILES.items()}
    assert not found["without FiLM"].meta.architecture.film
    last = Policy.new(2 if kept else 3)
    for name, wanted in (("imitation only", imitated), ("with policy gradient", last)):
        assert all((found[name].parameters[n] == a).all() for n, a in wanted.parameters.items())
