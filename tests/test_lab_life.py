"""How a lab begins, runs a command and ends: nothing of it stays, whatever ends it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError, WorkerFailedError
from arachne_runtime.plan import files
from arachne_runtime.plan.plan import MadeBy, Pipeline, Plan, Replica, Stage
from launch import lab
from launch.lab import Enforcement, Lab, LabDevice
from launch.lab.state import LAB_VARIABLE, read_state
from launch.torchrun import run_ranks
from tests.labs import REPOSITORY, has_quotas, two_shares, write_lab

ARACHNE = [sys.executable, "-m", "launch"]


def start(*words: str, **options) -> subprocess.Popen[str]:
    """A lab to which no signal is ignored: what started the tests may do so (nohup, a shell's ``&``)."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = ("env", "--default-signal", *ARACHNE, "lab", *words)
    return subprocess.Popen(words, env=environment, **{**pipes, **options})


def test_the_command_runs_once_in_the_lab_and_its_exit_code_is_the_labs(tmp_path):
    words = [sys.executable, "-c", f"import os; print(os.environ['{LAB_VARIABLE}'], flush=True); os._exit(6)"]
    process = start(str(write_lab(tmp_path)), "--", *words)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 6
    assert len(out.splitlines()) == 1
    assert not Path(out.strip()).exists()
    assert "lab: small:1 right: 0.2 of a core" in err
    assert "lab: shares: by" in err
    process = start(str(write_lab(tmp_path)), "--", str(tmp_path / "missing"))
    assert "No such file" in process.communicate(timeout=100)[1]
    assert process.returncode == 2


def test_a_folder_of_labs_that_others_may_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (folder := tmp_path / f"arachne-lab-{os.getuid()}").mkdir()
    folder.chmod(0o777)
    with pytest.raises(UnsupportedEnvironmentError, match="must be a folder that only you may write"):
        lab.sweep()


def test_more_shares_than_cores_are_warned_of(tmp_path):
    cores = len(os.sched_getaffinity(0))
    shares = Lab(device=tuple(LabDevice(name=f"d{i}", share=1.0) for i in range(cores + 1)))
    with lab.active(shares) as on:
        assert on.notes[0].startswith(
            f"warning: the shares add up to {cores + 1} cores, but this process may"
        )
    with lab.active(two_shares(0.1, 0.2)) as on:
        assert not any("warning" in note for note in on.notes)


def test_devices_are_found_by_name_and_labs_do_not_nest():
    with lab.active(two_shares(0.5, 0.5)) as on:
        assert read_state(on.state_file) == lab.current()
        with pytest.raises(UsageError, match="no device 'v:0'; its devices are low:0, high:0"):
            run_ranks(["v:0"], [__file__])
        with pytest.raises(UsageError, match="labs do not nest"), lab.active(two_shares(0.5, 0.5)):
            pass
    assert lab.current() is None
    with pytest.raises(UsageError, match="is no running lab"):
        lab.current({LAB_VARIABLE: str(on.state_file)})


@pytest.mark.parametrize("enforcement", list(Enforcement)[1:])
def test_a_killed_rank_leaves_nothing(tmp_path, enforcement):
    if enforcement is Enforcement.QUOTA and not has_quotas():
        pytest.skip("needs a CPU controller that this user may write")
    script = tmp_path / "die.py"
    script.write_text(
        "import os, signal, subprocess\nsubprocess.Popen(['sleep', '300'])\nos.kill(os.getpid(), 9)"
    )
    with lab.active(two_shares(0.5, 0.5), enforcement=enforcement) as on:
        with pytest.raises(WorkerFailedError, match=r"device low:0.*SIGKILL"):
            run_ranks(["low:0"], [str(script)], quiet=True)
        folder = on.state_file.parent
    assert not folder.exists()
    assert threading.active_count() == 1


def test_a_plan_for_other_shares_is_warned_of_with_both(tmp_path):
    stage = Stage(layers=(0, 1), replicas=(Replica(devices=("big:0",), share=1),))
    pipeline = Pipeline(micro_batches=1, micro_batch=1, stages=(stage,))
    digests = dict.fromkeys(("cluster", "model", "profile"), "sha256:0")
    words = [*ARACHNE, "run", str(tmp_path / "plan.json"), "--", str(tmp_path / "train.py")]
    (tmp_path / "train.py").touch()
    for planned, warned in (("cpu-0.5", True), ("cpu-0.8", False)):
        made_by = MadeBy(solver="arachne", version="0", device_types={"big": planned}, **digests)
        plan = Plan(model="tiny", global_batch=1, sequence=1, pipelines=(pipeline,), made_by=made_by)
        files.write(plan, tmp_path / "plan.json")
        process = start(str(write_lab(tmp_path)), "--", *words)
        err = process.communicate(timeout=100)[1]
        assert process.returncode == 0
        assert (f"big was planned for as {planned}, but is cpu-0.8 in this lab" in err) is warned


SLEEP = [
    sys.executable,
    "-c",
    "import os, time; print(os.environ['ARACHNE_LAB'], flush=True); time.sleep(300)",
]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_command_and_lab(tmp_path, number):
    process = start(str(write_lab(tmp_path)), "--", *SLEEP)
    state = Path(process.stdout.readline().strip())
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert not state.parent.exists()


def test_ctrl_c_reaches_the_command_and_the_lab_follows(tmp_path):
    process = start(str(write_lab(tmp_path)), "--", *SLEEP, start_new_session=True)
    state = Path(process.stdout.readline().strip())
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode in (1, 128 + signal.SIGINT)
    assert not state.parent.exists()


@pytest.mark.parametrize("enforcement", ["auto", "duty-cycle"])
def test_a_killed_lab_takes_its_command_along_and_is_swept_up_by_the_next(tmp_path, enforcement):
    process = start("--enforce", enforcement, str(write_lab(tmp_path)), "--", *SLEEP)
    state_file = Path(process.stdout.readline().strip())
    state = read_state(state_file)
    process.kill()
    process.communicate(timeout=100)  # ends when the command, which holds the pipes, has ended
    assert state_file.exists()
    assert state_file.parent in lab.sweep()
    assert not state_file.exists()
    assert not [seat for seat in state.seats if seat.cgroup and Path(seat.cgroup).exists()]
