"""`arachne run --elastic` with real processes: what is lost is replaced, and the losses stay."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from arachne_runtime.membership.client import CoordinatorLostError, ask_status
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch.elastic import job_file
from launch.processes import environment, every_pid, stat_fields

from .elastic_ranks import undisturbed

ROOT = Path(__file__).parents[1]
STEPS = 30
PATIENCE_S = 100


def plan_of(*devices: str) -> Plan:
    """A pipeline of one stage on each device."""
    stages = [Stage(layers=(0, 1), replicas=(Replica(devices=(device,), share=4),)) for device in devices]
    pipelines = tuple(Pipeline(micro_batches=1, micro_batch=4, stages=(stage,)) for stage in stages)
    return Plan(model="tiny", global_batch=4 * len(devices), sequence=1, pipelines=pipelines)


class Job:
    """The command, and what a person could do to its processes."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder, self.process = folder, process

    def allow(self, step: int) -> None:
        """Ranks go on up to this step."""
        (self.folder / "limit.new").write_text(str(step))
        (self.folder / "limit.new").replace(self.folder / "limit")

    def told(self, device: str) -> list[dict]:
        path = self.folder / f"told-{device}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_(self, condition, what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the job ended\n{self.log}"
            assert time.monotonic() < end, f"waited in vain: {what}\n{self.log}"
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def status(self):
        job = job_file.find_job(None)
        try:
            return ask_status(job.address, job.token, 2)
        except CoordinatorLostError:
            return None

    def await_members(self, *devices: str, after: int) -> None:
        """A generation of these that all its members have entered."""

        def there() -> bool:
            found = self.status()
            if found is None or found.generation <= after or set(found.members) != set(devices):
                return False
            return f"generation {found.generation} trains on" in self.log

        self.await_(there, f"a generation after {after} of {devices}")

    def child(self, module: str) -> int | None:
        """The process of this job that runs a module, and is no zombie."""
        parent = str(self.process.pid)
        found = [pid for pid in every_pid() if stat_fields(pid)[1:2] == [parent]]
        return next((pid for pid in found if f"launch.elastic.{module}" in self.words(pid)), None)

    def island(self, node: str) -> int:
        """Of a node: the parent of its ranks."""
        return int(stat_fields(self.told(f"{node}:0")[-1]["pid"])[1])

    def words(self, pid: int) -> str:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return ""


@contextmanager
def job(folder: Path, monkeypatch, plan: Plan, *words: str, options: tuple[str, ...] = ()):
    """A job in training or about to be; nothing of it is left behind."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    write(plan, folder / "plan.json")
    (folder / "limit").write_text("5")
    command = [sys.executable, "-m", "launch", "run", "--elastic", *options, str(folder / "plan.json"), "--"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *words], stdout=log, stderr=log, text=True, env=variables)
    try:
        yield Job(folder, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(folder: Path, monkeypatch, plan: Plan, *words: str, options: tuple[str, ...] = ()):
    """A job to its end: its exit code and all that it said."""
    with job(folder, monkeypatch, plan, *words, options=options) as running:
        code = running.process.wait(PATIENCE_S)
        return code, running.log


PACED = ("-m", "tests.elastic_script")


@pytest.mark.timeout(240)
def test_what_is_lost_is_replaced_and_the_losses_stay(tmp_path, monkeypatch):
    """A killed rank, a stopped one, the coordinator, and a whole node, one after the other."""
    devices = ("a:0", "a:1", "b:0")
    with job(tmp_path, monkeypatch, plan_of(*devices), *PACED, str(tmp_path), str(STEPS)) as running:
        running.await_(lambda: len(running.told("a:1")) == 5, "five steps")

        os.kill(running.told("a:1")[-1]["pid"], signal.SIGKILL)
        running.await_members("a:0", "b:0", after=1)
        running.await_members(*devices, after=2)
        running.allow(10)
        running.await_(lambda: running.told("a:1")[-1]["step"] == 10, "ten steps")

        os.kill(running.told("b:0")[-1]["pid"], signal.SIGSTOP)
        running.await_members("a:0", "a:1", after=3)
        assert "b:0 is stopped" in running.log
        running.await_members(*devices, after=4)

        told = "the coordinator was killed by SIGKILL"
        for count in (1, 2):  # again as it comes back
            running.await_(lambda: running.child("coordinating"), "a coordinator")
            os.kill(running.child("coordinating"), signal.SIGKILL)
            running.await_(lambda count=count: running.log.count(told) == count, "its loss is told")
        running.allow(15)
        running.await_(lambda: running.told("b:0")[-1]["step"] == 15, "fifteen steps")

        os.kill(running.island("b"), signal.SIGKILL)
        running.await_members(*devices, after=5)  # in one change or two: the coordinator has just come back
        running.allow(STEPS)
        assert running.process.wait(PATIENCE_S) == 0, running.log
        print(running.log)
        losses = undisturbed(STEPS)
        for device in devices:
            found = running.told(device)
            assert [one["loss"] for one in found] == pytest.approx(
                [losses[one["step"] - 1] for one in found], abs=1e-9
            )
        assert sorted({one["step"] for one in running.told("a:0")}) == list(range(1, STEPS + 1))
    assert not list((tmp_path / "arachne").iterdir())


def arachne(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launch", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables, check=False)


@pytest.mark.timeout(200)
def test_a_node_that_is_asked_to_leave_does_so_between_two_steps_and_status_sees_it(tmp_path, monkeypatch):
    plan = plan_of("a:0", "b:0")
    with job(tmp_path, monkeypatch, plan, *PACED, str(tmp_path), str(STEPS)) as running:
        running.await_(lambda: len(running.told("b:0")) == 5, "five steps")
        before = arachne("status")
        words = [sys.executable, "-m", "launch", "status", "--watch"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        watching = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=variables)
        assert watching.stdout.readline().endswith("training, generation 1\n")
        os.kill(running.island("b"), signal.SIGTERM)
        running.await_members("a:0", after=1)
        watched = ""  # it looks once a second: before the rest of the steps, which may take less
        while "generation 2" not in watched:
            watched += (line := watching.stdout.readline())
            assert line, watched
        after = json.loads(arachne("status", "--json").stdout)
        running.allow(STEPS)
        assert running.process.wait(PATIENCE_S) == 0, running.log
        found = running.told("a:0")
        watching.communicate(timeout=20)  # it ends with the job
    assert "training, generation 2 of 1; a device leaves\n" in watched
    assert before.returncode == 0, before.stderr
    assert "training, generation 1\n" in before.stdout
    assert "  members   a:0, b:0\n" in before.stdout
    assert (after["generation"], after["members"], after["why"]) == (2, ["a:0"], "a device leaves")
    assert "node b was asked to leave" in running.log
    assert "redone" not in running.log
    assert [one["step"] for one in found] == list(range(1, STEPS + 1))
    assert [one["loss"] for one in found] == pytest.approx(undisturbed(STEPS), abs=1e-9)
    gone = arachne("status")
    assert (gone.returncode, gone.stdout) == (5, "")
    assert "no elastic job of this user runs on this machine" in gone.stderr


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


def test_a_users_error_ends_the_job_with_its_words(tmp_path, monkeypatch):
    fails = (
        "import os, time\nif os.environ['ARACHNE_DEVICE'] == 'a:1':\n    raise ValueError('no such expert')\n"
    )
    code, log = run(tmp_path, monkeypatch, plan_of("a:0", "a:1"), script(tmp_path, fails + "time.sleep(300)"))
    assert code == 1
    said = [line for line in log.splitlines() if not line.startswith("[")]
    assert said[0] == "rank 1 failed (device a:1): ValueError: no such expert"
    assert said[-1] == "rank 1 exited with code 1; the other was ended"
    assert "Traceback" not in log


def test_a_process_that_dies_alike_three_times_before_it_trains_ends_the_job(tmp_path, monkeypatch):
    dies = (
        "import os, sys, time\nif os.environ['ARACHNE_DEVICE'] == 'a:1':\n"
        "    print('no such driver', file=sys.stderr)\n    os._exit(3)\ntime.sleep(300)\n"
    )
    options = ("--log-dir", str(tmp_path / "logs"))
    code, log = run(tmp_path, monkeypatch, plan_of("a:0", "a:1"), script(tmp_path, dies), options=options)
    assert code == 1
    assert log.count("a:1: exited with code 3; a fresh process in") == 2
    said = log[log.index("\nrank 1 failed") :]
    assert said.splitlines()[1:3] == [
        "rank 1 failed (device a:1): exited with code 3, without a Python error",
        "  its last words:",
    ]
    assert said.count("no such driver") == 1
    assert (tmp_path / "logs" / "rank-a-1.err").read_text() == 3 * "no such driver\n"


def test_a_script_without_a_session_ends_as_it_does_anywhere(tmp_path, monkeypatch):
    tell = (
        "import os\nfd = int(os.environ['ARACHNE_TOKEN_FD'])\nprint(len(os.fdopen(fd).read()), 'characters')"
    )
    code, log = run(tmp_path, monkeypatch, plan_of("a:0", "b:0"), script(tmp_path, tell))
    assert (code, log.count("64 characters")) == (0, 2)
    assert "[a:0] 64 characters\n" in log


def test_a_reader_who_has_left_ends_nothing(tmp_path, monkeypatch):
    """As in `arachne run --elastic ... 2>&1 | head -1`."""
    text = "import sys, time\nfor _ in range(20):\n    print('again', file=sys.stderr)\n    time.sleep(0.1)\n"
    text += f"open({str(tmp_path / 'done')!r}, 'w').close()\n"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    write(plan_of("a:0"), tmp_path / "plan.json")
    command = [sys.executable, "-m", "launch", "run", "--elastic", str(tmp_path / "plan.json"), "--"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, script(tmp_path, text)], stderr=subprocess.PIPE, text=True, env=variables
    )
    with process.stderr:
        process.stderr.readline()
    assert process.wait(PATIENCE_S) == 0
    assert (tmp_path / "done").exists()


STAYS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
with open(os.path.join(sys.argv[1], os.environ["ARACHNE_DEVICE"]), "w") as file:
    file.write("here")
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, monkeypatch, number):
    """The fixture of all tests looks for what is left, children of ranks in other sessions included."""
    plan = plan_of("a:0", "b:0")
    with job(tmp_path, monkeypatch, plan, script(tmp_path, STAYS), str(tmp_path)) as running:
        for device in plan.devices:
            running.await_(lambda name=device: (tmp_path / name).exists(), f"{device} runs")
        running.process.send_signal(number)
        code = running.process.wait(PATIENCE_S)
        assert code == (130 if number is signal.SIGINT else -number), running.log
        end = time.monotonic() + 15
        while number is signal.SIGKILL and list(ours(tmp_path)) and time.monotonic() < end:
            time.sleep(0.05)
    assert "Traceback" not in running.log


def ours(folder: Path):
    """Processes of a job in this folder."""
    mark = f"XDG_RUNTIME_DIR={folder}".encode()
    return (pid for pid in every_pid() if pid != os.getpid() and mark in environment(pid))


SSH = """#!/bin/sh
echo "$@" >> SSH_LOG
while [ "$1" = -o ]; do shift 2; done
shift
exec sh -c "$*"
"""
"""Plays ssh: notes what it was given and runs the command here."""
ELSEWHERE = "192.0.2.7"  # an address for documentation (RFC 5737): never this machine's


def test_a_node_that_never_starts_ends_the_job_with_what_ssh_said(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'ssh: no route to host' >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    hosts = f'format = "arachne.hosts/1"\n[node.a]\naddress = "{ELSEWHERE}"\n'
    (tmp_path / "hosts.toml").write_text(hosts)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = ("--hosts", str(tmp_path / "hosts.toml"))
    code, log = run(tmp_path, monkeypatch, plan_of("a:0"), script(tmp_path, ""), options=options)
    assert code == 5
    assert log.count("it starts again in") == 3
    assert log.endswith("the island of node a exited with code 255\n  ssh: no route to host\n")


def test_without_its_store_a_job_ends(tmp_path, monkeypatch):
    waits = script(tmp_path, "import time\ntime.sleep(300)")
    with job(tmp_path, monkeypatch, plan_of("a:0"), waits) as running:
        running.await_(lambda: "arachne status" in running.log, "the job's file")
        os.kill(running.child("store"), signal.SIGKILL)
        assert running.process.wait(PATIENCE_S) == 5
        assert "the c10d store was killed by SIGKILL\nwithout it no group can be formed again" in running.log


def words_of_all() -> list[str]:
    """Command line and environment of every process."""
    found = []
    for pid in every_pid():
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
        found += [word.decode(errors="replace") for word in environment(pid)]
    return found


def test_islands_start_through_ssh_and_nobody_reads_the_token_from_a_process(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.replace("SSH_LOG", str(tmp_path / "ssh.log")))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts.toml").write_text(
        f'format = "arachne.hosts/1"\n[node.a]\naddress = "127.0.0.1"\n[node.b]\naddress = "{ELSEWHERE}"\n'
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    tell = (
        "import os\nfrom tests.test_elastic_run import words_of_all\n"
        "token, words = os.fdopen(int(os.environ['ARACHNE_TOKEN_FD'])).read(), words_of_all()\n"
        "print(os.environ['ARACHNE_COORDINATOR'].startswith('127.'), any(token in w for w in words))\n"
    )
    plan, options = plan_of("a:0", "b:0"), ("--hosts", str(tmp_path / "hosts.toml"))
    code, log = run(tmp_path, monkeypatch, plan, script(tmp_path, tell), options=options)
    assert code == 0, log
    assert "[a:0] False False\n" in log
    assert "[b:0] False False\n" in log
    (line,) = (tmp_path / "ssh.log").read_text().splitlines()
    assert line.startswith("-o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3 192.0.2.7 cd ")
    assert line.endswith(" -m launch.elastic.island")
