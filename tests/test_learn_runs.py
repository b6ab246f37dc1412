"""What runs measured fine-tunes the policy: on parts of their clusters, at corrected costs."""

import json

import pytest
from msgspec import structs

from arachne_runtime.errors import ExitCode, UsageError
from arachne_runtime.plan.files import read_profile, write
from launch.profiling.cluster_file import write_cluster
from planner.feedback import correct
from planner.policy.policy import Policy
from planner.training.draw import drawn
from planner.training.fine_tune import fine_tune
from planner.training.labels import Labels, ProblemSet, load
from planner.training.problem import Problem
from planner.training.recipe import Recipe
from planner.training.run import train
from planner.training.variants import variants
from tests.recorded import write_run
from tests.test_feedback import CLUSTER, MODEL, ONE_STAGE, PIPELINE, profile, run, unlike
from tests.test_learn import arachne

RECIPE = Recipe.tuning(small=True)


def test_variants_are_parts_of_a_cluster_and_the_same_every_time():
    found = list(variants(MODEL, profile(), [CLUSTER], ProblemSet.TUNING, 12))
    assert [d.seed for d in found] == list(range(12))
    assert {d.request.model for d in found} == {MODEL}
    whole = {node.name for node in CLUSTER.nodes}
    parts = [{node.name for node in d.request.cluster.nodes} for d in found]
    assert all(part <= whole for part in parts)
    assert len({frozenset(part) for part in parts}) > 2
    again = list(variants(MODEL, profile(), [CLUSTER], ProblemSet.TUNING, 12))
    assert [d.request.cluster for d in again] == [d.request.cluster for d in found]
    other = list(variants(MODEL, profile(), [CLUSTER], ProblemSet.TUNING_VALIDATION, 12))
    assert [d.request.cluster for d in other] != [d.request.cluster for d in found]


def test_weights_are_tuned_to_corrected_costs(tmp_path):
    runs = [run(plan, profile(unlike), seed=k) for k, plan in enumerate((ONE_STAGE, PIPELINE))]
    correction = correct(profile(), runs)
    trained = fine_tune(RECIPE, correction, runs, tmp_path, start=Policy.new(0))
    assert [row.source for row in trained.evaluation.rows][:2] == ["start", "imitation"]
    tuned = Policy.load(trained.weights)
    assert tuned.meta.trained.startswith("not trained; then 8 problems of m ")
    steps = [json.loads(line)["step"] for line in trained.curves.read_text().splitlines()]
    assert steps[: RECIPE.passes + 1] == list(range(RECIPE.passes + 1))
    again = fine_tune(RECIPE, correction, runs, tmp_path, start=Policy.new(0))
    assert again.evaluation == trained.evaluation
    _other_runs_are_refused(runs, tmp_path)
    _its_labels_are_of_no_random_problem(tmp_path / "labels")


def _other_runs_are_refused(runs, folder):
    with pytest.raises(UsageError, match=r"other inputs.*another folder"):
        fine_tune(RECIPE, correct(profile(), runs[:1]), runs, folder, start=Policy.new(0))
    with pytest.raises(UsageError, match=r"other inputs.*another folder"):
        fine_tune(RECIPE, correct(profile(), runs), runs, folder, start=Policy.new(1))


def _its_labels_are_of_no_random_problem(labels):
    with pytest.raises(UsageError, match="0 usable labels of training problems"):
        train(structs.replace(Recipe.small(), most_devices=1024), labels.parent / "other", labels=labels)
    one: Labels = next(load(labels, ProblemSet.TUNING))
    with pytest.raises(UsageError, match=r"^tuning problems are of the runs"):
        Problem.of(one)
    with pytest.raises(UsageError, match="tuning-validation problems are of the runs"):
        drawn(ProblemSet.TUNING_VALIDATION, 0)


def test_runs_of_another_model_teach_nothing(tmp_path):
    correction = correct(profile(), [run(ONE_STAGE, profile(unlike))])
    with pytest.raises(UsageError, match="0 models named 'm'"):
        fine_tune(RECIPE, correction, [], tmp_path, start=Policy.new(0))


def test_the_verb_needs_the_profile_that_runs_correct(tmp_path):
    done = arachne("learn", "--from", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == ExitCode.USAGE
    assert "--from and --profile go together" in done.stderr


def test_the_verb_corrects_a_profile_and_tunes_the_shipped_weights(tmp_path):
    write(profile(), tmp_path / "profile.json")
    write(MODEL, tmp_path / "model.json")
    write_cluster(CLUSTER, tmp_path / "cluster.toml")
    write_run(tmp_path / "runs", run(PIPELINE, profile(unlike)))
    write(PIPELINE, tmp_path / "runs" / "plan.json")
    out = tmp_path / "out"
    words = ("--from", tmp_path / "runs", "--profile", tmp_path / "profile.json", "--out", out)
    done = arachne("learn", "--recipe", "small", *words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    before, after = (answer["correction"]["runs"][0][when]["error"] for when in ("before", "after"))
    assert abs(after) < 0.02 < abs(before)
    assert read_profile(out / "profile.json") != profile()
    assert Policy.load(out / "policy.npz").meta.trained.startswith(Policy.load().meta.trained)
