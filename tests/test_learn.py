"""Training as a whole: the small recipe learns, goes on where it was killed, and learns nothing at rate 0."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from msgspec import structs

from arachne_runtime.errors import ExitCode, UsageError
from planner.policy.policy import Policy
from planner.training.context import Stage
from planner.training.recipe import Recipe
from planner.training.run import train

OPTIONS = {"--out", "--recipe", "--from", "--profile", "--labels", "--seed", "--json"}
TINY = structs.replace(
    Recipe.small(), name="tiny", problems=8, validation=8, passes=3, updates=4, check_every=2
)
LEAST_GAIN = 0.03
"""Of the small recipe, in the mean logarithm of seconds: 3 % faster proposals."""


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small recipe, from nothing to weights."""
    folder = tmp_path_factory.mktemp("small")
    return folder, train(Recipe.small(), folder)


@pytest.mark.timeout(300)
def test_the_small_recipe_gets_better_than_its_start(small):
    _, trained = small
    start = trained.evaluation.row("start").mean_lost
    found = trained.evaluation.row("policy gradient" if trained.improved else "imitation").mean_lost
    assert np.mean(found) < np.mean(start) - LEAST_GAIN


def test_its_card_and_curves_are_those_of_the_run(small):
    folder, trained = small
    text = trained.card.read_text()
    assert "| start |" in text
    for row in trained.evaluation.rows:
        assert f"{100 * row.mean_lost[0]:+.1f} %" in text
    points = [json.loads(line) for line in trained.curves.read_text().splitlines()]
    losses = [p["figures"]["validation_loss"] for p in points if p["stage"] == "imitation"]
    assert len(losses) == 1 + Recipe.small().passes
    assert min(losses) < losses[0]
    assert (folder / "curves.png").exists()
    assert Policy.load(trained.weights).meta.trained.endswith("recipe small, seed 0")


def test_nothing_is_learned_at_rate_0(small, tmp_path):
    folder, _ = small
    still = structs.replace(TINY, learning_rate=0.0, update_rate=0.0)
    trained = train(still, tmp_path, labels=folder / "labels")
    assert not trained.improved
    start, imitation = (trained.evaluation.row(name) for name in ("start", "imitation"))
    assert imitation.mean_lost == start.mean_lost


def test_a_run_that_was_killed_ends_with_the_same_weights(small, tmp_path):
    folder, _ = small
    labels = folder / "labels"
    whole = train(TINY, tmp_path / "whole", labels=labels)

    def killed_at(stage, step, of):
        def on_progress(progress):
            if progress.stage is stage and progress.part >= step / of:
                raise KilledError

        return on_progress

    place = tmp_path / "killed"
    for stage, step, of in ((Stage.IMITATION, 2, TINY.passes), (Stage.POLICY_GRADIENT, 3, TINY.updates)):
        with pytest.raises(KilledError):
            train(TINY, place, killed_at(stage, step, of), labels=labels)
    again = train(TINY, place, labels=labels)
    assert again.weights.read_bytes() == whole.weights.read_bytes()
    assert again.curves.read_bytes() == whole.curves.read_bytes()
    other = train(structs.replace(TINY, seed=1), tmp_path / "other", labels=labels)
    assert other.weights.read_bytes() != whole.weights.read_bytes()


def test_a_folder_of_another_recipe_is_refused(small):
    folder, _ = small
    with pytest.raises(UsageError, match=r"holds a training run of another recipe"):
        train(TINY, folder)


def test_a_folder_that_learned_from_other_labels_is_refused(small, tmp_path):
    labels = tmp_path / "labels"
    shutil.copytree(small[0] / "labels", labels)
    short = structs.replace(TINY, passes=1, updates=0)
    first = train(short, tmp_path / "run", labels=labels)
    assert train(short, tmp_path / "run", labels=labels).evaluation == first.evaluation
    lines = (labels / "labels.jsonl").read_bytes().splitlines(keepends=True)
    (labels / "labels.jsonl").write_bytes(b"".join(lines[1:]))
    with pytest.raises(UsageError, match=r"other inputs.*another folder"):
        train(short, tmp_path / "run", labels=labels)
    with pytest.raises(UsageError, match=r"other inputs.*another folder"):
        train(short, tmp_path / "run")


def test_a_folder_without_labels_is_refused_before_the_run_begins(tmp_path):
    with pytest.raises(UsageError, match=r"holds no labels"):
        train(TINY, tmp_path / "run", labels=tmp_path / "typo")
    assert not (tmp_path / "run").exists()


def arachne(*words):
    command = [sys.executable, "-m", "launch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_options_are_frozen():
    told = re.findall(r"^ +(--[a-z-]+)", arachne("learn", "--help").stdout, re.MULTILINE)
    assert set(told) - {"--help"} == OPTIONS


def test_the_verb_goes_on_with_a_run_and_tells_what_it_gave(small):
    folder, trained = small
    done = arachne("learn", "--recipe", "small", "--out", folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["weights"] == str(trained.weights)
    assert answer["evaluation"]["rows"][0]["source"] == "start"
    text = arachne("learn", "--recipe", "small", "--out", folder).stdout
    assert text.startswith("# The learned policy\n")


def test_an_unknown_recipe_is_refused(tmp_path):
    done = arachne("learn", "--recipe", "smal", "--out", tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "no recipe named 'smal'; known: standard, small" in done.stderr
