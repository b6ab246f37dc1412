"""One job on two nodes with unequal numbers of ranks: real agents on loopback; a script plays ssh."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arachne_runtime.errors import InvalidFileError
from arachne_runtime.plan import files
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch import nodes
from launch.hosts import Host, Hosts, interface_of, is_local, read_hosts

REPOSITORY = Path(__file__).parents[1]
ARACHNE = [sys.executable, "-m", "launch"]
ELSEWHERE = "192.0.2.7"  # an address for documentation (RFC 5737): never this machine's

SSH = """#!/bin/sh
echo "$@" >> SSH_LOG
while [ "$1" = -o ]; do shift 2; done
shift
exec sh -c "$*"
"""
"""Plays ssh: notes what it was given and runs the command here."""

JOINED = """
import json, os, sys, time
rank, total = int(os.environ["RANK"]), 6.0
if sys.argv[1] == "joined":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    total = total.item()
    dist.destroy_process_group()
told = {name: os.environ[name] for name in ("ARACHNE_DEVICE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
with open(os.path.join(os.environ["TOLD"], str(rank)), "w") as file:
    json.dump({**told, "sum": total}, file)
FAULT
"""


def a_plan() -> Plan:
    """One device on v, which comes first, and three on a."""
    first = Stage(layers=(0, 1), replicas=(Replica(devices=("v:0",), share=3),))
    last = Stage(layers=(1, 2), replicas=tuple(Replica(devices=(f"a:{i}",), share=1) for i in (2, 0, 1)))
    pipeline = Pipeline(micro_batches=1, micro_batch=3, stages=(first, last))
    return Plan(model="tiny", global_batch=3, sequence=1, pipelines=(pipeline,))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Job":
    return Job(tmp_path, monkeypatch)


class Job:
    """Files of a job on two nodes, and an environment with a played ssh."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.plan, self.hosts = folder, folder / "plan.json", folder / "hosts.toml"
        files.write(a_plan(), self.plan)
        self.told, self.ssh_log = folder / "told", folder / "ssh.log"
        self.told.mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH.replace("SSH_LOG", str(self.ssh_log)))
        (folder / "bin" / "ssh").chmod(0o755)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TOLD": str(self.told),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        self.write_hosts()

    def write_hosts(self, v: str = "127.0.0.1", a: str = ELSEWHERE) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.hosts.write_text(
            f'format = "arachne.hosts/1"\n[node.a]\naddress = "{a}"\nssh = "me@a"\n'
            f'[node.v]\naddress = "{v}"\nport = {port}\n'
        )

    def start(self, *options: str, fault: str = "", how: str = "alone") -> "subprocess.Popen[str]":
        script = self.folder / "train.py"
        script.write_text(JOINED.replace("FAULT", fault))
        words = [
            *ARACHNE,
            "run",
            str(self.plan),
            "--hosts",
            str(self.hosts),
            *options,
            "--",
            str(script),
            how,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, env=self.environment, cwd=self.folder, **pipes)

    def run(self, *options: str, fault: str = "", how: str = "alone") -> "subprocess.CompletedProcess[str]":
        process = self.start(*options, fault=fault, how=how)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ranks(self) -> list[dict]:
        return [json.loads((self.told / str(rank)).read_text()) for rank in range(4)]


def check_ranks(ranks: list[dict]) -> None:
    assert (
        tuple(rank["ARACHNE_DEVICE"] for rank in ranks)
        == rank_order(a_plan())
        == ("v:0", "a:0", "a:1", "a:2")
    )
    assert [rank["GROUP_RANK"] for rank in ranks] == ["0", "1", "1", "1"]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in ranks] == ["1", "3", "3", "3"]
    assert {rank["sum"] for rank in ranks} == {6.0}


def test_ranks_of_unequal_nodes_come_in_the_plans_order(job):
    done = job.run(how="joined")
    assert done.returncode == 0, done.stderr
    check_ranks(job.ranks())
    (line,) = job.ssh_log.read_text().splitlines()
    assert line.startswith(f"-o BatchMode=yes me@a cd {job.folder} && exec env ARACHNE_LEASH=sha256:")
    assert f"--node a -- {job.folder}/train.py" in line


def test_nodes_can_be_started_by_hand_in_any_order(job):
    job.write_hosts(v="127.0.0.1", a="127.0.0.2")
    last = job.start("--node", "a")
    first = job.start("--node", "v")
    for process in (first, last):
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, out + err
    check_ranks(job.ranks())
    assert not job.ssh_log.exists()


def test_the_root_failure_of_all_nodes_is_told_once(job):
    fault = "if rank == 2: raise ValueError('no such expert')\ntime.sleep(300)"
    done = job.run(fault=fault)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert said[0] == "rank 2 failed (device a:1, pipeline 0, stage 1): ValueError: no such expert"
    assert said[-1] == "rank 2 exited with code 1; the other 3 were ended"
    assert "Traceback" not in done.stderr
    assert "failure {" not in done.stderr


def test_the_root_is_waited_for_though_another_nodes_ranks_fail_first(job):
    fault = (
        "if rank == 0: raise ConnectionError('Connection closed by peer')\n"
        "time.sleep(4)\nif rank == 3: raise ValueError('slow to say so')\ntime.sleep(300)"
    )
    done = job.run(fault=fault)
    assert "rank 3 failed (device a:2, pipeline 0, stage 1): ValueError: slow to say so" in done.stderr


def test_a_node_that_cannot_start_ends_the_job_with_its_words(job):
    (job.folder / "bin" / "ssh").write_text("#!/bin/sh\necho 'ssh: no route to host' >&2\nexit 255\n")
    done = job.run()
    assert done.returncode == 5
    assert done.stderr.splitlines()[-2:] == ["node a: ssh exited with code 255", "  ssh: no route to host"]


def test_a_lost_node_starts_again_with_all_others(job):
    """The first time ssh breaks off, as when the node reboots."""
    ssh, once = job.folder / "bin" / "ssh", job.folder / "lost"
    lost = f"#!/bin/sh\n[ -e {once} ] || {{ touch {once}; echo 'ssh: connection lost' >&2; exit 255; }}\n"
    ssh.write_text(lost + ssh.read_text().removeprefix("#!/bin/sh\n"))
    done = job.run("--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "node a: ssh exited with code 255\n  ssh: connection lost\nrestart 1 of 1" in done.stderr
    check_ranks(job.ranks())


def test_another_plan_on_another_node_is_noticed(job):
    other = (
        (job.folder / "bin" / "ssh")
        .read_text()
        .replace("exec sh", f'sed -i \'s/"tiny"/"large"/\' {job.plan}\nexec sh')
    )
    (job.folder / "bin" / "ssh").write_text(other)
    job.write_hosts(v="127.0.0.1")
    done = job.run("--max-restarts", "3")  # a mistake, which no restart mends
    assert done.returncode == 5
    assert "restart" not in done.stderr
    assert "the plan on this node differs from the one where the job was started" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_starter_ends_every_node(job, number):
    process = job.start(fault="time.sleep(300)")
    end = time.monotonic() + 30
    while len(list(job.told.iterdir())) < 4:
        assert time.monotonic() < end, "ranks did not start"
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)  # returns when every node has closed its end of the pipes
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert "Traceback" not in err


def test_a_dry_run_prints_every_nodes_command_and_starts_nothing(job):
    done = job.run("--dry-run", "--trace", "records")
    first, last = done.stdout.splitlines()
    assert first.startswith("v: env ARACHNE_LEASH=")
    assert last.startswith("a: ssh -o BatchMode=yes me@a 'cd ")
    assert f"--trace {job.folder}/records" in last
    done = job.run("--dry-run", "--node", "a")
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"a: {sys.executable} ")
    assert not job.ssh_log.exists()
    assert not list(job.told.iterdir())
    words = [*ARACHNE, "run", str(job.plan), "--dry-run", "--", "train.py"]
    alone = subprocess.run(words, env=job.environment, capture_output=True, text=True)
    assert [line.split()[:2] for line in alone.stdout.splitlines()] == [
        [f"RANK={i}", f"ARACHNE_DEVICE={device}"] for i, device in enumerate(rank_order(a_plan()))
    ]


def test_hosts_are_checked(job, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        'format = "arachne.hosts/1"\n[node.a]\naddress = "-x"\nport = 70000\nssh = "-oProxyCommand=x"\n'
    )
    with pytest.raises(InvalidFileError) as caught:
        read_hosts(wrong)
    assert [problem.path for problem in caught.value.problems] == [
        "$.node.a.address",
        "$.node.a.port",
        "$.node.a.ssh",
    ]
    with pytest.raises(InvalidFileError, match=r"\$\.node\.a  missing; the plan has devices there"):
        nodes.check_hosts_of(a_plan(), Hosts(node={"v": Host(address="x")}), wrong)
    done = job.run("--node", "b")
    assert (done.returncode, done.stderr) == (2, "the plan has no devices on node 'b'; its nodes are v, a\n")


def test_local_addresses_and_their_interfaces_are_known():
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local(ELSEWHERE)
    assert not is_local("no-such-host.invalid")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(ELSEWHERE) is None


@pytest.mark.timeout(240)
def test_all_nodes_start_again_together(job):
    fault = (
        "import signal\ndied = os.path.join(os.environ['TOLD'], 'died')\n"
        "if rank == 2 and not os.path.exists(died):\n"
        "    open(died, 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = job.start("--max-restarts", "1", fault=fault)
    _, err = process.communicate(timeout=220)
    assert process.returncode == 0, err
    assert "killed by signal 9 (SIGKILL)" in err
    assert "restart 1 of 1" in err
    check_ranks(job.ranks())
    assert len(job.ssh_log.read_text().splitlines()) == 2
