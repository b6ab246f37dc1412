"""`run_plan` and `run_ranks` with real processes: places, environments, output, and how failures are told."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arachne_runtime.errors import InvalidFileError, UsageError, WorkerFailedError
from arachne_runtime.plan import files
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch.failure import Failure, Report
from launch.script import script_command
from launch.torchrun import run_plan, run_ranks

REPOSITORY = Path(__file__).parents[1]
ARACHNE = [sys.executable, "-m", "launch"]

TELL = """
import json, os, sys
names = "RANK WORLD_SIZE ARACHNE_PLAN ARACHNE_TRACE ARACHNE_TENSORBOARD ARACHNE_DEVICE OMP_NUM_THREADS"
names = names.split()
told = {name: os.environ.get(name) for name in names}
told |= {"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__}
with open(os.path.join(os.environ["TOLD"], told["RANK"]), "w") as file:
    json.dump(told, file)
"""

JOINED = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def barrier():
    time.sleep(300)
if sys.argv[1:] == ["joined"]:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    barrier = dist.barrier
def step():
    FAULT
    barrier()
step()
"""
"""Ranks that run until they are ended; `joined` ones lose their connections when one of them fails."""


def a_plan() -> Plan:
    """Two stages; the second node comes first, so that rank order is not the order of names."""
    first = Stage(
        layers=(0, 1), replicas=tuple(Replica(devices=(device,), share=1) for device in ("v:1", "v:0"))
    )
    last = Stage(layers=(1, 2), replicas=(Replica(devices=("a:0",), share=2),))
    pipeline = Pipeline(micro_batches=1, micro_batch=2, stages=(first, last))
    return Plan(model="tiny", global_batch=2, sequence=1, pipelines=(pipeline,))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    files.write(a_plan(), file)
    return file


def script(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text(text)
    return str(file)


def failing(folder: Path, fault: str) -> str:
    return script(folder, JOINED.replace("FAULT", fault))


def told(folder: Path) -> list[dict]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(len(list(folder.glob("[0-9]"))))]


def test_ranks_are_the_plans_devices_in_rank_order_with_their_environment(tmp_path, plan_file, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told").mkdir()
    words = ["python", script(tmp_path, TELL), "--lr", "3"]
    run_plan(
        Path("plan.json"),
        words,
        env={"TOLD": str(tmp_path / "told")},
        trace=Path("trace"),
        tensorboard=Path("board"),
    )
    ranks = told(tmp_path / "told")
    assert [rank["ARACHNE_DEVICE"] for rank in ranks] == ["v:0", "v:1", "a:0"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"3"}
    assert {rank["ARACHNE_PLAN"] for rank in ranks} == {str(plan_file)}
    assert {rank["ARACHNE_TRACE"] for rank in ranks} == {str(tmp_path / "trace")}
    assert {rank["ARACHNE_TENSORBOARD"] for rank in ranks} == {str(tmp_path / "board")}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"1"}
    assert ranks[0]["argv"] == words[1:]
    assert (ranks[0]["path"], ranks[0]["name"], ranks[0]["file"]) == (str(tmp_path), "__main__", words[1])


def test_a_module_runs_from_the_working_folder_and_own_threads_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(TELL)
    run_ranks(["a:0"], ["-m", "mine.train", "x"], env={"TOLD": str(tmp_path / "told")})
    (rank,) = told(tmp_path / "told")
    assert rank["argv"] == [str(tmp_path / "mine" / "train.py"), "x"]
    assert (rank["path"], rank["OMP_NUM_THREADS"], rank["ARACHNE_PLAN"]) == (str(tmp_path), "2", None)


REUSES = """
import os, resource, sys
import numpy

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [numpy.zeros(2**18, dtype="f8") + 1 for _ in range(32)]  # 2 MiB each
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step(), step()
with open(os.path.join(os.environ["TOLD"], os.environ["RANK"]), "w") as file:
    file.write(str(step()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc is told to keep memory")
def test_memory_that_a_step_frees_stays_with_its_rank(tmp_path):
    """Given back and taken anew, 32 arrays of 2 MiB are 16384 pages of 4 KiB."""
    (tmp_path / "told").mkdir()
    run_ranks(["a:0"], [script(tmp_path, REUSES)], env={"TOLD": str(tmp_path / "told")})
    assert told(tmp_path / "told")[0] < 1000


def test_a_rank_ends_as_python_does_with_its_threads_pools_and_exit_handlers(tmp_path, capfd):
    script = tmp_path / "ends.py"
    script.write_text(
        "import atexit, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def late(word):\n"
        "    time.sleep(0.2)\n"
        "    print(word)\n"
        "atexit.register(print, 'handler', end='')\n"
        "threading.Thread(target=late, args=('thread',)).start()\n"
        "ThreadPoolExecutor().submit(late, 'pool')\n"
    )
    run_ranks(["here:0"], [str(script)])
    words = capfd.readouterr().out.split()
    assert sorted(words[:2]) == ["pool", "thread"]
    assert words[2] == "handler"


def test_output_is_passed_on_by_whole_lines_with_the_rank(tmp_path, capfd):
    text = "import os, sys\nprint('to out', os.environ['RANK'])\nprint('to err', end='', file=sys.stderr)"
    run_ranks(["a:0", "a:1"], [script(tmp_path, text)], log_dir=tmp_path / "logs")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] to out 0", "[1] to out 1"]
    assert sorted(err.splitlines()) == ["[0] to err", "[1] to err"]
    assert (tmp_path / "logs" / "rank-1.out").read_text() == "to out 1\n"
    run_ranks(["a:0", "a:1"], [script(tmp_path, text)], quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_told_with_rank_place_words_notes_and_lines(tmp_path, plan_file):
    fault = (
        "if rank == 1:\n        error = ValueError('the batch has 7 rows')\n"
        "        error.add_note('give it 8')\n        raise error from KeyError('rows')"
    )
    with pytest.raises(WorkerFailedError) as caught:
        run_plan(plan_file, [failing(tmp_path, fault), "joined"], log_dir=tmp_path / "logs")
    lines = str(caught.value).splitlines()
    assert lines[0] == ("rank 1 failed (device v:1, pipeline 0, stage 0): ValueError: the batch has 7 rows")
    assert lines[1:3] == ["  give it 8", "  caused by KeyError: 'rows'"]
    assert "    raise error from KeyError('rows')" in lines
    assert "runpy" not in str(caught.value)
    assert "launch" not in str(caught.value).replace(str(tmp_path), "")
    assert lines[-1] == "rank 1 exited with code 1; the other 2 were ended"
    assert (caught.value.rank, caught.value.worker_code) == (1, 1)
    assert "The direct cause" in (tmp_path / "logs" / "rank-1.traceback").read_text().replace("the ", "The ")


def test_an_error_in_the_users_own_function_is_told_without_the_lines_of_its_caller(tmp_path, plan_file):
    fault = (
        "if rank == 1:\n        from arachne_runtime import ModelParts\n"
        "        def model(): return 1 / 0\n        ModelParts.of(model)"
    )
    with pytest.raises(WorkerFailedError) as caught:
        run_plan(plan_file, [failing(tmp_path, fault)])
    told = str(caught.value)
    assert "ZeroDivisionError: division by zero" in told
    assert "def model(): return 1 / 0" in told
    assert "ModelParts.of(model)" in told
    assert "arachne_runtime/model" not in told


@pytest.mark.parametrize(
    ("fault", "headline", "code", "how"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "killed by signal 9 (SIGKILL); the kernel sends it",
            -9,
            "alone",
        ),
        ("sys.exit(7)", "the script called sys.exit(7)", 7, "joined"),
        ("sys.exit('no data')", "the script called sys.exit(no data)", 1, "alone"),
        ("os._exit(9)", "exited with code 9, without a Python error", 9, "alone"),
    ],
)
def test_other_ends_are_told_as_what_they_are(tmp_path, fault, headline, code, how):
    with pytest.raises(WorkerFailedError) as caught:
        run_ranks(["a:0", "b:0"], [failing(tmp_path, f"if rank == 1: {fault}"), how], quiet=True)
    assert str(caught.value).startswith(f"rank 1 failed (device b:0): {headline}")
    assert (caught.value.rank, caught.value.worker_code) == (1, code)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 failed .*: was stopped"),
        ("if rank == 1: sys.exit()", "\\n  before that, the script had ended without an error on rank 1:"),
        ("if rank == 1: time.sleep(60)", "\\n  no rank had failed before: one took longer than the others"),
    ],
)
def test_a_rank_that_does_not_come_is_told_though_only_others_fail(tmp_path, fault, told):
    joined = JOINED.replace('("gloo")', '("gloo", timeout=__import__("datetime").timedelta(seconds=2))')
    with pytest.raises(WorkerFailedError, match=told):
        run_ranks(["a:0", "a:1"], [script(tmp_path, joined.replace("FAULT", fault)), "joined"], quiet=True)


def test_a_stopped_rank_is_ended_and_named_though_the_others_would_wait_for_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.stopped.STOPPED_S", 1.0)
    fault = "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"rank 1 failed \(device a:1\): was stopped \(SIGSTOP\)"):
        run_ranks(["a:0", "a:1"], [failing(tmp_path, fault), "joined"], quiet=True)
    assert time.monotonic() - start < 60


def test_a_rank_that_stops_for_a_moment_is_left_alone(tmp_path):
    text = (
        "import os, signal, subprocess\n"
        "subprocess.Popen(['sh', '-c', f'sleep 1; kill -CONT {os.getpid()}'])\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    run_ranks(["a:0"], [script(tmp_path, text)], quiet=True)


def test_a_script_that_exits_with_zero_is_fine_and_syntax_errors_are_shown(tmp_path):
    run_ranks(["a:0"], [script(tmp_path, "import sys\nsys.exit(0)")])
    run_ranks(["a:0"], [script(tmp_path, "import sys\nsys.exit()")])
    with pytest.raises(WorkerFailedError, match=r"SyntaxError: .*\n.*line 2\n.*if True print"):
        run_ranks(["a:0"], [script(tmp_path, "x = 1\nif True print\n")], quiet=True)


def test_what_a_failed_rank_started_does_not_outlive_the_job(tmp_path):
    started = "if rank == 1: subprocess.Popen(['setsid', 'sleep', '300']); time.sleep(0.2); os._exit(3)"
    with pytest.raises(WorkerFailedError, match="exited with code 3"):
        run_ranks(["a:0", "a:1"], [failing(tmp_path, started)], quiet=True)
    # that nothing is left is what the fixture of conftest.py checks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_rank_and_the_launcher_dies_of_it_but_of_none_that_is_ignored(
    tmp_path, plan_file, number
):
    waiting = failing(tmp_path, "open(os.environ['READY'] + str(rank), 'w').close(); time.sleep(300)")
    environment = {**os.environ, "READY": str(tmp_path / "ready-"), "PYTHONPATH": str(REPOSITORY)}
    words = ["nohup", *ARACHNE, "run", str(plan_file), "--", waiting]
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
    process.send_signal(signal.SIGHUP)  # the terminal is gone, and nothing happens
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == (130 if number is signal.SIGINT else -signal.SIGTERM)
    assert ("interrupted; all ranks ended" in err) is (number is signal.SIGINT)
    assert "Traceback" not in err


def test_ranks_die_when_their_launcher_is_killed(tmp_path, plan_file):
    waiting = failing(tmp_path, "open(os.environ['READY'] + str(rank), 'w').close(); time.sleep(300)")
    environment = {**os.environ, "READY": str(tmp_path / "ready-"), "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([*ARACHNE, "run", str(plan_file), "--", waiting], env=environment)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
    process.kill()
    process.wait()


def test_the_command_line_exits_with_1_for_a_worker_and_3_for_the_plan(tmp_path, plan_file):
    words = [failing(tmp_path, "if rank == 2: raise RuntimeError('no memory left')")]
    done = arachne("run", str(plan_file), "--", *words)
    assert done.returncode == 1
    assert "rank 2 failed (device a:0, pipeline 0, stage 1): RuntimeError: no memory left" in done.stderr
    assert "exited with code 1" in done.stderr
    assert "the plan has 2 nodes (v, a): all start on this machine; --hosts hosts.toml" in done.stderr
    assert "Traceback" not in done.stderr
    plan_file.write_bytes(plan_file.read_bytes().replace(b'"global_batch": 2', b'"global_batch": 3'))
    done = arachne("run", str(plan_file), "--", *words)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)


def test_wrong_commands_and_plans_are_refused_before_anything_starts(tmp_path, plan_file):
    for words in ([], ["-m"], ["python"], [str(tmp_path / "missing.py")]):
        with pytest.raises(UsageError, match="no script"):
            run_plan(plan_file, words)
    with pytest.raises(InvalidFileError):
        run_plan(tmp_path / "missing.json", ["train.py"])
    assert script_command(["/usr/bin/python3.11", "-m", "a.b", "x"]) == ("-m", "a.b", "x")


def test_a_missing_script_is_told_before_torch_is_loaded(plan_file):
    code = (
        "import sys\nfrom launch.cli import main\ntry: main()\n"
        "except SystemExit as end: print(int(end.code), 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, "run", str(plan_file), "--", "missing.py"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.stdout == "2 False\n"
    assert done.stderr == "no script 'missing.py'; give a Python file, or -m package.module\n"


def test_what_cannot_be_run_or_written_is_refused_before_anything_starts(tmp_path, plan_file):
    marks = script(tmp_path, "import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    (tmp_path / "file").touch()
    for option in ("--trace", "--log-dir"):
        done = arachne("run", str(plan_file), option, str(tmp_path / "file" / "below"), "--", marks)
        assert done.returncode == 5
        assert f"{option} {tmp_path}/file/below: nothing can be written there (Not a dir" in done.stderr
        assert "Traceback" not in done.stderr
    text = plan_file.read_text()
    plan_file.write_text(text.replace('"layers"', '"zero": 2, "layers"'))
    done = arachne("run", str(plan_file), "--", marks)
    assert done.returncode == 3
    assert "$.pipelines[0].stages[0].zero is 2" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_root_is_the_first_failure_that_no_other_explains():
    lost = Failure(rank=0, where="", code=1, time_s=1.0, recorded=True, kind="RuntimeError", lost_peer=True)
    ended = Failure(rank=1, where="", code=-15, time_s=0.5)
    killed = Failure(rank=2, where="", code=-9, time_s=2.0)
    own = Failure(rank=3, where="", code=1, time_s=3.0, recorded=True, kind="ValueError")
    assert Report((lost, ended), 4).root is lost
    assert Report((lost, ended, killed), 4).root is killed
    assert Report((lost, ended, killed, own), 4).root is own


def arachne(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([*ARACHNE, *words], env=environment, capture_output=True, text=True, timeout=100)


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
