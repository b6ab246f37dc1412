"""What serves an elastic job and ends by itself: it says why, and is not started for ever."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.membership.messages import Ended
from launch.coordinator.journal import Journal
from launch.coordinator.worth import Offer
from launch.elastic import run
from launch.elastic.coordinating import Duties, Plans
from launch.elastic.helper import Helper
from launch.elastic.run import FIRST_PAUSE_S, MOST_KILLS, MOST_STARTS, _Patience
from launch.failure import NodeLostError

from .coordinator_world import plan_of

ROOT = Path(__file__).parents[1]


def ended(text: str) -> Helper:
    """A helper that ran this to its end."""

    async def end() -> Helper:
        helper = await Helper.start("the coordinator", [sys.executable, "-c", text])
        await helper.listen(lambda line: None)
        helper.tail.append(await helper.complaint())
        await helper.end(5)
        return helper

    return asyncio.run(end())


KILLED = "import os\nos.kill(os.getpid(), {})"


def test_only_a_kill_from_outside_says_nothing_of_the_next_start():
    crashed, killed = ended(KILLED.format(6)), ended(KILLED.format(9))
    patience = _Patience()
    for _ in range(MOST_STARTS - 1):
        patience.after(crashed, "it crashed")
    with pytest.raises(NodeLostError, match="it crashed"):
        patience.after(crashed, "it crashed")
    patience = _Patience()
    assert [patience.after(killed, "") for _ in range(MOST_KILLS)] == [FIRST_PAUSE_S] * MOST_KILLS
    for _ in range(MOST_STARTS - 1):
        patience.after(killed, "no memory")
    with pytest.raises(NodeLostError, match="no memory"):
        patience.after(killed, "no memory")


def test_what_crashed_is_told_with_its_last_words():
    crashed = ended("import os, sys\nprint('no room', file=sys.stderr, flush=True)\nos.abort()")
    assert crashed.tail[-1] == "the coordinator was killed by SIGABRT\n  no room"


def test_a_coordinator_that_cannot_go_on_ends_with_its_error(tmp_path):
    (tmp_path / "journal").write_text("no entry\n")
    duties = Duties(
        plan=plan_of(("a:0",)), journal=str(tmp_path / "journal"), token="x" * 64, host="127.0.0.1"
    )
    command = [sys.executable, "-m", "launch.elastic.coordinating"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdin.write(msgspec.json.encode(duties) + b"\n")
    process.stdin.flush()  # and it stays open: the leash is held
    told = process.stderr.read().decode()
    assert process.wait(30) == 1
    assert "was altered: its checksum differs" in told
    process.stdin.close()
    process.stderr.close()


class Frugal:
    """A planner that does without all devices but one."""

    def plan_for(self, devices, running):
        return Offer(plan=plan_of(devices[:1]), samples_per_s=1.0)


def test_min_devices_is_of_devices_that_are_there():
    plans = Plans(Frugal(), min_devices=2)
    assert plans(("a:0", "a:1"), None).plan == plan_of(("a:0",))
    assert plans(("a:0",), None) is None


def test_the_command_ends_with_the_coordinators_word_though_no_process_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LAST_WORDS_S", 0.01)
    journal = Journal.open(tmp_path / "journal")

    async def follow() -> None:
        running = run.ElasticRun(run.ElasticJob(plan=plan_of(("a:0",)), command=("train.py",)), tmp_path)
        running._course.lost(["a:0"])
        running._spawn(running._follow())
        journal.append(Ended(why="no plan fits, and nothing changed in 600 s"))
        await asyncio.wait_for(running.result, 10)

    with pytest.raises(NoFeasiblePlanError, match="nothing changed in 600 s"):
        asyncio.run(follow())
    journal.close()


def test_a_signal_ends_a_job_that_has_not_begun():
    async def begin() -> bool:
        ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, ended.set_result, None)
        await asyncio.wait_for(run._unless_ended(asyncio.sleep(60), ended), 10)
        return ended.done()

    assert asyncio.run(begin())
