"""``arachne run --max-restarts``: a worker is killed, and the job starts again from its checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arachne_runtime.plan.files import write
from bench.checkpoints_train import losses, told
from launch.failure import Failure, NodeLostError, RanksFailedError, Report
from launch.restarts import with_restarts
from tests.test_session import LITTLE

ROOT = Path(__file__).parents[1]


def run(folder: Path, deaths: dict[int, int], *options: str) -> subprocess.CompletedProcess[str]:
    """A job of two ranks, of which one is killed before each step of ``deaths``, once."""
    write(LITTLE, folder / "plan.json")
    script = ["--", "-m", "bench.checkpoints_train", folder, json.dumps(deaths)]
    return arachne_run(folder / "plan.json", *options, *script)


def arachne_run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", "run", *map(str, words)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=220, env=variables, check=False)


@pytest.mark.timeout(240)
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path):
    done = run(tmp_path, {3: 1, 6: 0}, "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed by signal 9 (SIGKILL)") == 2
    assert "restart 2 of 2" in done.stderr
    expected, found = dict(losses(None, {})), told(done.stdout)
    assert [step for step, _ in found] == [0, 1, 2, 2, *range(3, 12)]
    assert [loss for _, loss in found] == pytest.approx([expected[step] for step, _ in found], rel=1e-5)


def failing(times: int) -> list[int]:
    """Counts starts, of which the first ones fail."""
    calls: list[int] = []

    def start() -> None:
        calls.append(len(calls))
        if len(calls) <= times:
            raise RanksFailedError(Report((Failure(rank=0, where="a:0", code=1, time_s=0.0),), 1))

    with_restarts(start, 2)
    return calls


def test_restarts_are_counted_and_told(capsys):
    assert failing(0) == [0]
    assert failing(2) == [0, 1, 2]
    assert capsys.readouterr().err.count("restart ") == 2
    with pytest.raises(RanksFailedError, match="rank 0 failed"):
        failing(3)


def test_a_lost_node_has_time_to_come_back():
    pauses: list[float] = []

    def start() -> None:
        raise NodeLostError("node a: ssh exited with code 255")

    with pytest.raises(NodeLostError):
        with_restarts(start, 8, pauses.append)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_single_node_cannot_restart_the_others(tmp_path):
    write(LITTLE, tmp_path / "plan.json")
    options = ["--hosts", "hosts.toml", "--node", "a", "--max-restarts", 1]
    done = arachne_run(tmp_path / "plan.json", *options, "--", "train.py")
    assert done.returncode == 2
    assert "leave --node out" in done.stderr
