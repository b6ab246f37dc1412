"""The lab: its file, and its limits as measured by real ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from arachne_runtime.errors import InvalidFileError
from launch import lab
from launch.lab import Enforcement, Lab, LabDevice, LabNetwork, cgroup, duty, network
from launch.torchrun import run_ranks
from tests.labs import LAB, REPOSITORY, needs_quotas, needs_root, two_shares, write_lab

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
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
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


EXCHANGE = """
import os, time, torch, torch.distributed as dist
from pathlib import Path
from arachne_runtime.measure.links import _exchange
dist.init_process_group("gloo")
peer, size = 1 - dist.get_rank(), 1_000_000  # 8 Mbit
out, into = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
_exchange(out[:8], into[:8], peer)
start = time.perf_counter()
for _ in range(8): _exchange(out, into, peer)
(Path(os.environ["TOLD"]) / str(dist.get_rank())).write_text(str((time.perf_counter() - start) / 8))
dist.destroy_process_group()
"""


@needs_root
def test_messages_of_both_ends_are_measured_on_the_link_at_once(tmp_path):
    (script := tmp_path / "exchange.py").write_text(EXCHANGE)
    devices = tuple(LabDevice(name=name, share=0.5) for name in "ab")
    limited = Lab(device=devices, network=LabNetwork(rate_Mbps=100))
    with lab.active(limited) as on:
        if not any("100 Mbit/s" in note and "NOT" not in note for note in on.notes):
            pytest.skip(f"this kernel cannot limit a rate: {on.notes}")
        run_ranks(list(limited.devices), [str(script)], env={"TOLD": str(tmp_path)})
    for rank in "01":  # 0.16 s if one had to leave before the other
        assert float((tmp_path / rank).read_text()) == pytest.approx(0.08, rel=0.25)


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
