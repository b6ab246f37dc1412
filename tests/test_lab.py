"""The lab: its file, its limits as measured by real ranks, and that nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from arachne_runtime.errors import (
    InvalidFileError,
    UnsupportedEnvironmentError,
    UsageError,
    WorkerFailedError,
)
from launch import lab
from launch.lab import Enforcement, Lab, LabDevice, LabNetwork, cgroup, duty, network
from launch.lab.state import LAB_VARIABLE, read_state
from launch.torchrun import run_ranks

REPOSITORY = Path(__file__).parents[1]
ARACHNE = [sys.executable, "-m", "launch"]
ROOT = os.geteuid() == 0


def has_quotas() -> bool:
    try:
        groups = cgroup.create(cgroup.own_hierarchy(), f"arachne-lab-{os.getpid()}-probe", [0.5])
    except Exception:
        return False
    cgroup.remove([*groups, groups[0].parent])
    return True


needs_quotas = pytest.mark.skipif(not has_quotas(), reason="needs a CPU controller that this user may write")
needs_root = pytest.mark.skipif(not ROOT, reason="needs root")

LAB = """
format = "arachne.lab/1"
[[device]]
name = "big"
share = 0.8
[[device]]
name = "left"
node = "small"
share = 0.2
[[device]]
name = "right"
node = "small"
share = 0.2
"""

BURN = """
import json, os, sys, time
def waited():
    try:
        return int(open("/proc/self/schedstat").read().split()[1]) / 1e9
    except OSError:
        return 0.0
def burn(cpu_s):
    wall, cpu, queue = time.perf_counter(), time.process_time(), waited()
    while time.process_time() - cpu < cpu_s:
        sum(range(2000))
    return {"wall_s": time.perf_counter() - wall, "waited_s": waited() - queue}
time.sleep(0.3)
burn(0.05)
"""
"""How long a fixed amount of CPU work takes, and how much of that was waiting for a core in use by others."""
BURNING_RANK = f"""{BURN}
with open(os.path.join(os.environ["TOLD"], os.environ["ARACHNE_DEVICE"]), "w") as file:
    json.dump(burn(float(sys.argv[1])), file)
"""
CPU_S = 0.3
TRIES = 4
TOO_BUSY = 0.03
"""Part of the time spent waiting for a core that makes a figure one of the machine, not of the lab."""


def two_shares(low: float, high: float) -> Lab:
    return Lab(device=(LabDevice(name="low", share=low), LabDevice(name="high", share=high)))


def burn(
    folder: Path, devices: Sequence[str], script: str = BURNING_RANK, words: Sequence[str] = ()
) -> dict[str, dict]:
    """What each device of the lab that is on tells of ``CPU_S`` seconds of work, all at once."""
    (file := folder / "burn.py").write_text(script)
    run_ranks(devices, [str(file), str(CPU_S), *words], env={"TOLD": str(folder)})
    return {name: json.loads((folder / name).read_text()) for name in devices}


def check_shares(
    attempt: Callable[[], dict[str, dict]],
    shares: dict[str, float],
    tolerance: float,
    witness: str | None = None,
) -> None:
    """No device is ever faster than its share; nor slower, unless others kept it waiting for a core.

    A rank under a quota seems to wait whenever it is throttled, so there a whole core's rank is the witness.
    """
    for _ in range(TRIES):
        told = attempt()
        errors = {name: told[name]["wall_s"] * share / CPU_S - 1 for name, share in shares.items()}
        assert min(errors.values()) > -tolerance, told
        if max(errors.values()) < tolerance:
            return
        watched = [witness] if witness else list(shares)
        if all(told[name]["waited_s"] < TOO_BUSY * told[name]["wall_s"] for name in watched):
            pytest.fail(f"slower than their shares by {errors}: {told}")
    pytest.skip(f"the machine is too busy to measure shares: {told}")


def write_lab(folder: Path, text: str = LAB) -> Path:
    file = folder / "lab.toml"
    file.write_text(text)
    return file


# --- the file


def test_a_lab_is_a_cluster_of_device_types_by_share(tmp_path):
    found = lab.read_lab(write_lab(tmp_path, LAB + "[network]\nrate_Mbps = 400\nlatency_ms = 2\n"))
    cluster = found.cluster()
    assert cluster.devices == tuple(found.devices) == ("big:0", "small:0", "small:1")
    assert [cluster.device_type(device) for device in cluster.devices] == ["cpu-0.8", "cpu-0.2", "cpu-0.2"]
    assert cluster.link("big", "small").inter_GBps == 0.05
    assert cluster.link("big", "small").latency_us == 2000
    assert LabDevice(name="whole", share=1.0).device_type == "cpu"


def test_every_problem_of_a_lab_is_listed(tmp_path):
    text = LAB.replace('"right"', '"left"').replace("0.8", "1.5").replace("0.2", "0.001", 1)
    with pytest.raises(InvalidFileError) as caught:
        lab.read_lab(write_lab(tmp_path, text + "[network]\nrate_Mbps = 0\nlatency_ms = -1\n"))
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert found.keys() == {
        "$.device[0].share",
        "$.device[1].share",
        "$.device[2].name",
        "$.device[2].share",
        "$.network.rate_Mbps",
        "$.network.latency_ms",
    }
    assert "give one of them a node of its own" in found["$.device[2].share"]
    with pytest.raises(InvalidFileError, match=r"device\[0\]\.name .*'a:0' is no name"):
        lab.read_lab(write_lab(tmp_path, LAB.replace('"big"', '"a:0"')))
    with pytest.raises(InvalidFileError, match=r"\$\.device .*add a \[\[device\]\]"):
        lab.read_lab(write_lab(tmp_path, 'format = "arachne.lab/1"\ndevice = []\n'))


# --- quotas


@pytest.mark.parametrize(
    ("share", "quota_us", "period_us"),
    [(1, 10_000, 10_000), (0.2, 2000, 10_000), (0.1, 1000, 10_000), (0.03, 1000, 33_333)],
)
def test_a_quota_keeps_its_share_at_one_millisecond_or_more(share, quota_us, period_us):
    assert cgroup.Quota.of(share) == cgroup.Quota(quota_us, period_us)


def test_both_versions_of_control_groups_are_found_and_written(tmp_path):
    own = tmp_path / "one" / "jobs" / "mine"
    own.mkdir(parents=True)
    mounts = f"33 24 0:28 / {tmp_path}/one rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    found = cgroup.find_hierarchy(mounts, "3:cpuset:/\n2:cpu,cpuacct:/jobs/mine\n0::/\n")
    assert found == cgroup.Hierarchy(1, own)
    (inner,) = cgroup.create(found, "lab", [0.2])
    assert (inner / "cpu.cfs_quota_us").read_text() == "2000"

    two = tmp_path / "two"
    (two / "user" / "session").mkdir(parents=True)
    (two / "cgroup.controllers").write_text("cpu memory\n")
    (two / "user" / "cgroup.subtree_control").write_text("memory cpu\n")
    (two / "user" / "session" / "cgroup.subtree_control").mkdir()  # cannot be written, like a busy group's
    mounts = f"33 24 0:28 / {two} rw,relatime - cgroup2 cgroup2 rw\n"
    found = cgroup.find_hierarchy(mounts, "0::/user/session\n")
    assert found == cgroup.Hierarchy(2, two / "user")
    (inner,) = cgroup.create(found, "lab", [0.2])
    assert (inner / "cpu.max").read_text() == "2000 10000"
    assert (two / "user" / "lab" / "cgroup.subtree_control").read_text() == "+cpu"

    with pytest.raises(Exception, match="no CPU controller"):
        cgroup.find_hierarchy("", "0::/\n")


@needs_quotas
def test_a_fifth_of_a_core_takes_five_times_as_long(tmp_path):
    shares = two_shares(0.2, 1.0)
    with lab.active(shares, enforcement=Enforcement.QUOTA):  # 150 periods at a fifth of a core
        check_shares(
            lambda: burn(tmp_path, ["low:0", "high:0"]), {"low:0": 0.2, "high:0": 1.0}, 0.05, "high:0"
        )


# --- duty cycle


def test_a_duty_cycle_does_the_same_within_its_tolerance(tmp_path):
    shares = two_shares(0.2, 0.6)
    with lab.active(shares, enforcement=Enforcement.DUTY_CYCLE) as on:
        assert any("as asked" in note for note in on.notes)
        check_shares(
            lambda: burn(tmp_path, list(shares.devices)), {"low:0": 0.2, "high:0": 0.6}, duty.TOLERANCE
        )


def test_a_duty_cycle_counts_what_a_rank_starts(tmp_path):
    parent = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]], check=True)"
    )
    with lab.active(two_shares(0.25, 0.25), enforcement=Enforcement.DUTY_CYCLE):
        check_shares(
            lambda: burn(tmp_path, ["low:0"], parent, [BURNING_RANK]), {"low:0": 0.25}, duty.TOLERANCE
        )


AS_NOBODY = """
import os, sys, time
from launch import lab
from launch.lab import place
os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
one = lab.Lab(device=(lab.LabDevice(name="a", share=0.25),), network=lab.LabNetwork(rate_Mbps=1))
with lab.active(one) as on:
    print(*on.notes, sep="\\n", flush=True)
    child = os.fork()
    if not child:
        os.setsid()
        place.take(on.state.seats[0])
        exec(BURN)
        print(json.dumps(burn(CPU_S)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@needs_root
def test_without_root_shares_are_kept_by_duty_cycle_and_the_network_is_said_to_be_free():
    def run() -> dict[str, dict]:
        words = [sys.executable, "-c", f"BURN, CPU_S = {BURN!r}, {CPU_S}\n{AS_NOBODY}"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        shares, limits, told = done.stdout.splitlines()
        assert "by stopping and continuing ranks, coarser than a quota (no CPU quota below" in shares
        assert limits == "network: not limited (network namespaces need root)"
        return {"a:0": json.loads(told)}

    check_shares(run, {"a:0": 0.25}, duty.TOLERANCE)


# --- network

SEND = """
import json, os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, block = dist.get_rank(), torch.zeros(1_000_000)  # 32 Mbit
def rate(a, b):
    dist.barrier()
    start = time.perf_counter()
    if rank == a: dist.send(block, b)
    if rank == b: dist.recv(block, a)
    return 32 / (time.perf_counter() - start)
found = {}
for a, b in ((0, 1), (1, 0), (1, 2)):
    rates = [rate(a, b) for _ in range(2)]
    if rank == b: found[f"{a}{b}"] = rates[-1]
with open(os.path.join(os.environ["TOLD"], str(rank)), "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@needs_root
def test_nodes_send_at_the_rate_of_their_network_and_devices_of_a_node_freely(tmp_path):
    (script := tmp_path / "send.py").write_text(SEND)
    devices = (
        LabDevice(name="a", share=0.5),
        *(LabDevice(name=f"b{i}", node="b", share=0.5) for i in (0, 1)),
    )
    limited = Lab(device=devices, network=LabNetwork(rate_Mbps=200))
    with lab.active(limited) as on:
        if not any("200 Mbit/s" in note and "NOT" not in note for note in on.notes):
            pytest.skip(f"this kernel cannot limit a rate: {on.notes}")
        run_ranks(list(limited.devices), [str(script)], env={"TOLD": str(tmp_path)})
    found = {k: v for rank in "012" for k, v in json.loads((tmp_path / rank).read_text()).items()}
    assert found["01"] == pytest.approx(200, rel=0.1)
    assert found["10"] == pytest.approx(200, rel=0.1)
    assert found["12"] > 400


@needs_root
def test_latency_is_kept_or_said_not_to_be():
    spaces = network.create(["a", "b"], LabNetwork(rate_Mbps=1000, latency_ms=20))
    try:
        if any("latency" in limit for limit in spaces.enforced):
            words = ["nsenter", f"--net={spaces.file_of('a')}", "ping", "-c3", "-q", "10.77.0.3"]
            said = subprocess.run(words, capture_output=True, text=True).stdout
            assert float(said.split("=")[1].split("/")[1]) == pytest.approx(40, rel=0.1)
        else:
            assert [s for s in spaces.shortfalls if s.startswith("a latency of 20 ms (")]
    finally:
        spaces.close()


@needs_root
def test_the_hub_is_left_and_namespaces_go_even_if_the_block_fails():
    home = os.readlink("/proc/thread-self/ns/net")
    limited = Lab(device=(LabDevice(name="a", share=0.5),), network=LabNetwork(rate_Mbps=100))
    inside = None
    with suppress(KeyError), lab.active(limited):
        inside = os.readlink("/proc/thread-self/ns/net")
        raise KeyError
    assert inside not in (None, home)
    assert os.readlink("/proc/thread-self/ns/net") == home


# --- life and death


def start(*words: str, **options) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*ARACHNE, "lab", *words], env=environment, **{**pipes, **options})


def test_the_command_runs_once_in_the_lab_and_its_exit_code_is_the_labs(tmp_path):
    words = [sys.executable, "-c", f"import os; print(os.environ['{LAB_VARIABLE}']); os._exit(6)"]
    process = start(str(write_lab(tmp_path)), "--", *words)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 6
    assert len(out.splitlines()) == 1
    assert not Path(out.strip()).exists()
    assert "lab: small:1 right: 0.2 of a core" in err
    assert "lab: shares: by" in err
    process = start(str(write_lab(tmp_path)), "--", str(tmp_path / "missing"))
    assert "No such file" in process.communicate(timeout=30)[1]
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
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert not state.parent.exists()


def test_ctrl_c_reaches_the_command_and_the_lab_follows(tmp_path):
    process = start(str(write_lab(tmp_path)), "--", *SLEEP, start_new_session=True)
    state = Path(process.stdout.readline().strip())
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode in (1, 128 + signal.SIGINT)
    assert not state.parent.exists()


@pytest.mark.parametrize("enforcement", ["auto", "duty-cycle"])
def test_a_killed_lab_takes_its_command_along_and_is_swept_up_by_the_next(tmp_path, enforcement):
    process = start("--enforce", enforcement, str(write_lab(tmp_path)), "--", *SLEEP)
    state_file = Path(process.stdout.readline().strip())
    state = read_state(state_file)
    process.kill()
    process.communicate(timeout=20)  # ends when the command, which holds the pipes, has ended
    assert state_file.exists()
    assert state_file.parent in lab.sweep()
    assert not state_file.exists()
    assert not [seat for seat in state.seats if seat.cgroup and Path(seat.cgroup).exists()]
