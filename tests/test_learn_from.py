"""``arachne learn --from``: runs correct a profile in a moment, without torch; what is wrong is said."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.plan.files import read_profile, write
from arachne_runtime.plan.profile import Source
from launch.cli import app
from launch.profiling.cluster_file import write_cluster
from tests.recorded import write_run
from tests.test_feedback import CLUSTER, MODEL, ONE_STAGE, PIPELINE, profile, run, unlike


@pytest.fixture
def folder(tmp_path):
    """A profile with its model and cluster, and two runs."""
    write(profile(), tmp_path / "profile.json")
    write(MODEL, tmp_path / "model.json")
    write_cluster(CLUSTER, tmp_path / "cluster.toml")
    for name, plan in (("monday", ONE_STAGE), ("tuesday", PIPELINE)):
        write_run(tmp_path / "runs" / name, run(plan, profile(unlike)))
        write(plan, tmp_path / "runs" / name / "plan.json")
    return tmp_path


def words(folder, *more):
    inputs = ["--from", folder / "runs", "--profile", folder / "profile.json"]
    return [str(word) for word in ("learn", *inputs, "--out", folder / "corrected.json", *more)]


def test_runs_correct_a_profile_that_arachne_plan_takes(folder):
    done = CliRunner().invoke(app(), words(folder))
    assert done.exit_code == 0, done.exception
    assert "monday" in done.output
    found = read_profile(folder / "corrected.json")
    layer = next(t for t in found.timings if (t.kind, t.device, t.samples) == ("layer", "cpu-0.8", 8))
    assert layer.forward_s == pytest.approx(8 * 0.02 * 1.5 * 0.95, rel=0.05)
    assert layer.source is Source.MEASURED


def test_a_corrected_folder_is_one_of_measurements(folder):
    out = folder / "tuned" / "profile.json"
    done = CliRunner().invoke(app(), words(folder, "--out", out))
    assert done.exit_code == 0, done.exception
    assert {path.name for path in out.parent.iterdir()} == {"profile.json", "model.json", "cluster.toml"}
    inputs = ["--cluster", folder / "tuned" / "cluster.toml", "--model", folder / "tuned"]
    plan = ["plan", *inputs, "--global-batch", 64, "--time-budget", 1, "--out", folder / "next.json"]
    again = CliRunner().invoke(app(), [str(w) for w in plan])
    assert again.exit_code == 0, again.output


def test_a_model_that_lies_there_is_left(folder):
    mine = folder / "mine"
    mine.mkdir()
    (mine / "model.json").write_text("mine")
    CliRunner().invoke(app(), words(folder, "--out", mine / "profile.json"))
    assert (mine / "model.json").read_text() == "mine"
    assert (mine / "profile.json").exists()


def test_the_answer_is_told_as_json(folder):
    done = CliRunner().invoke(app(), words(folder, "--json"))
    told = json.loads(done.output)
    assert [r["run"] for r in told["runs"]] == ["monday", "tuesday"]
    assert all(abs(r["after"]["error"]) < 0.05 < abs(r["before"]["error"]) for r in told["runs"])
    assert told["profile"] == str(folder / "corrected.json")


def test_it_needs_no_torch(folder):
    code = "import sys; from launch.cli import app; app()(sys.argv[1:], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words(folder, "--json")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_mistakes_are_told(folder):
    asked = words(folder)
    without = [w for i, w in enumerate(asked) if "--profile" not in asked[max(0, i - 1) : i + 1]]
    found = CliRunner().invoke(app(), without)
    assert isinstance(found.exception, UsageError)
    assert "--profile" in str(found.exception)
    wrong = (
        (["--recipe", "nonsense"], "no recipe named"),
        (["--recipe", "small"], "nothing is trained"),
        (["--labels", "any"], "--labels are"),
    )
    for more, said in wrong:
        found = CliRunner().invoke(app(), [*asked, *more])
        assert isinstance(found.exception, UsageError)
        assert said in str(found.exception)
    assert not (folder / "corrected.json").exists()
    (folder / "profile.json").write_text("{}")
    assert isinstance(CliRunner().invoke(app(), asked).exception, InvalidFileError)
