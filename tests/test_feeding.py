"""Recorded runs in folders feed a profile back: plans are found by digest, what is damaged is named."""

import json
from pathlib import Path

import pytest

from arachne_runtime.errors import InvalidFileError, UnsupportedEnvironmentError, UsageError
from arachne_runtime.plan.files import digest, encode, read_profile, write
from arachne_runtime.plan.plan import Predicted
from launch.feeding import feed_back, learn_costs
from launch.profiling.cluster_file import write_cluster
from launch.report.tell_correction import tell
from launch.torchrun import run_plan
from tests.recorded import write_run
from tests.test_feedback import CLUSTER, MODEL, ONE_STAGE, PIPELINE, profile, run, unlike


@pytest.fixture
def measured(tmp_path) -> Path:
    """What `arachne profile` leaves, and a folder for runs beside it."""
    write(profile(), tmp_path / "profile.json")
    write(MODEL, tmp_path / "model.json")
    write_cluster(CLUSTER, tmp_path / "cluster.toml")
    (tmp_path / "runs").mkdir()
    return tmp_path


def put(folder: Path, plan, *, with_plan=True, truth=None, seed=0):
    write_run(folder, run(plan, truth or profile(unlike), seed=seed))
    if with_plan:
        write(plan, folder / "plan.json")


def feed(measured: Path):
    return feed_back(measured / "runs", measured / "profile.json")


def test_every_run_below_a_folder_counts(measured):
    put(measured / "runs" / "monday", ONE_STAGE)
    put(measured / "runs" / "tuesday" / "first", PIPELINE)
    fed = feed(measured)
    assert [told.run for told in fed.correction.report] == ["monday", "tuesday/first"]
    assert all(abs(told.after.error) < 0.03 for told in fed.correction.report)
    assert fed.notes == ()


def test_a_corrected_profile_is_a_profile(measured):
    put(measured / "runs", PIPELINE)
    corrected = feed(measured).correction.profile
    write(corrected, measured / "corrected.json")
    assert encode(read_profile(measured / "corrected.json")) == encode(corrected)


def test_runs_of_two_plans_in_the_same_files_are_two_runs(measured):
    """As a job leaves them that changed its plan."""
    for plan, name in ((ONE_STAGE, "one.json"), (PIPELINE, "two.json")):
        put(measured / "runs" / "job", plan, with_plan=False)
        write(plan, measured / "runs" / name)
    names = {told.run for told in feed(measured).correction.report}
    assert names == {f"job ({digest(plan)[:14]})" for plan in (ONE_STAGE, PIPELINE)}


def test_records_of_a_plan_that_is_not_there_are_named(measured):
    put(measured / "runs" / "job", ONE_STAGE)
    put(measured / "runs" / "job", PIPELINE, with_plan=False)
    put(measured / "runs" / "other", PIPELINE, with_plan=False)
    fed = feed(measured)
    assert [told.run for told in fed.correction.report] == ["job"]
    assert fed.notes == (
        f"job: left out: records of plans that are not below the folder of runs: {digest(PIPELINE)}",
        "other: left out: no record is of a plan below the folder of runs; put the plan that ran there",
    )


def test_damaged_lines_and_files_are_named_and_left_out(measured):
    put(measured / "runs" / "job", PIPELINE)
    whole = feed(measured).correction
    with (measured / "runs" / "job" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"half": a li\n\xff\xfe\n[1, 2]\n{"kind": "action"}\n')
    (measured / "runs" / "job" / "notes.json").write_text('{"format": "arachne.plan/1", "model": 3}')
    (measured / "runs" / "empty").mkdir()
    (measured / "runs" / "empty" / "rank-0.jsonl").touch()
    fed = feed(measured)
    assert fed.correction.profile == whole.profile
    assert len(fed.notes) == 2
    assert fed.notes[0].startswith("empty: left out")
    assert fed.notes[1].startswith("job: left out: lines that are no records: rank-1.jsonl:")
    assert fed.notes[1].endswith(" and 1 more")


def test_a_missing_folder_or_file_says_what_to_do(measured):
    with pytest.raises(UsageError, match="holds no recorded run; record some: arachne run PLAN --trace"):
        feed(measured)
    put(measured / "runs", PIPELINE)
    (measured / "cluster.toml").unlink()
    with pytest.raises(InvalidFileError, match=r"cluster.toml of the runs"):
        feed(measured)
    with pytest.raises(InvalidFileError, match="no such file"):
        feed_back(measured / "runs", measured / "nowhere.json")


def test_only_runs_of_other_models_are_refused(measured):
    write(MODEL.__class__(name="other", sequence=16, blocks=MODEL.blocks), measured / "model.json")
    put(measured / "runs", PIPELINE)
    with pytest.raises(UsageError, match="the model is called 'other'"):
        feed(measured)


def test_the_answer_tells_errors_factors_and_notes(measured, capsys):
    put(measured / "runs" / "one", ONE_STAGE)
    put(measured / "runs" / "two", PIPELINE)
    put(measured / "runs" / "lost", PIPELINE, seed=3)
    (measured / "runs" / "lost" / "rank-0.jsonl").write_bytes(b"nothing\n")
    file = measured / "corrected.json"
    fed, answer = learn_costs(measured / "runs", measured / "profile.json", file)
    assert encode(read_profile(file)) == encode(fed.correction.profile)
    tell(answer)
    said = capsys.readouterr().out
    price = fed.correction.report[0]
    errors = [f"({part.error:+.1%})" for part in (price.before, price.after, price.held_out)]
    assert len(set(errors)) == 3
    row = next(line for line in said.splitlines() if errors[0] in line)
    assert [row.index(error) for error in errors] == sorted(row.index(error) for error in errors)
    assert "cpu-0.4" in said
    assert "lost: left out: lines that are no records" in said
    assert json.loads(encode(answer))["runs"][0]["before"]["error"] == price.before.error


def test_what_was_asked_wrongly_says_what_to_give(measured):
    with pytest.raises(UnsupportedEnvironmentError, match="--out"):
        learn_costs(measured / "runs", measured / "profile.json", measured / "model.json" / "corrected.json")


def test_a_traced_run_keeps_its_plan(tmp_path):
    """Records name their plan by its digest alone."""
    plan = ONE_STAGE.__class__(
        model="m", global_batch=1, sequence=1, pipelines=(_alone(),),
        predicted=Predicted(iteration_s=1.0, samples_per_s=1.0),
    )  # fmt: skip
    write(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text("pass\n")
    run_plan(tmp_path / "plan.json", [str(tmp_path / "train.py")], trace=tmp_path / "trace", quiet=True)
    [kept] = (tmp_path / "trace").glob("plan-*.json")
    assert kept.read_bytes() == (tmp_path / "plan.json").read_bytes()


def _alone():
    from arachne_runtime.plan.plan import Pipeline, Replica, Stage

    stage = Stage(layers=(0, 1), replicas=(Replica(devices=("a:0",), share=1),))
    return Pipeline(micro_batches=1, micro_batch=1, stages=(stage,))
