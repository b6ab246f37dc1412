"""Faults that the coordinator and its clients once had: silence that was its own, words that were lost."""

import asyncio
import gc
import random
import sys
import time
import warnings

import pytest

from arachne_runtime.membership.channel import new_token
from arachne_runtime.membership.client import JobEndedError, LeftOutError, MemberClient
from arachne_runtime.membership.messages import (
    AskStatus,
    Ended,
    Failed,
    Freeze,
    Leaving,
    Member,
    Published,
    Record,
    Refused,
)
from launch.coordinator.history import History
from launch.coordinator.phase import Phase
from launch.coordinator.roster import Roster
from launch.coordinator.server import Server
from launch.coordinator.settings import Settings

from .coordinator_process import TOKEN, Coordinator
from .coordinator_world import plan_of
from .test_coordinator import members, started


def test_a_coordinator_that_slept_itself_declares_nobody_dead():
    world = started()
    world.now_s += 60.0  # stopped, or starved: what the agents said meanwhile is not read yet
    world.do(world.machine.tick(world.now_s))
    assert any("slept for 60" in line for line in world.log)
    world.pass_time(1)
    assert (world.machine.history.generation, len(members(world))) == (1, 3)
    world.silent.add("b")
    world.pass_time(2.5)  # as long as ever
    assert members(world) == ["a:0", "a:1"]


def test_limits_of_a_phase_do_not_run_while_it_sleeps():
    world = started()
    for worker in world.team():
        worker.stop = list  # reports nothing
    world.say(world.team()[0].connection, Failed(generation=1, why="connection reset"))
    world.now_s += 60.0
    world.say(world.connect(), AskStatus())
    assert (world.machine.phase, len(world.machine._roster.seats)) == (Phase.FREEZING, 3)
    world.pass_time(world.settings.freeze_s + 1)
    assert world.machine.phase is not Phase.FREEZING


def test_a_process_is_not_dead_by_the_old_beat_of_its_node():
    roster = Roster(Settings(devices=("a:0",)))
    roster.hear("a", 0.0)  # an agent without processes, that ended
    roster.newly_suspected(50.0)
    roster.sit(Member(device="a:0", incarnation="x"), 1, 100.0)
    assert not list(roster.expired(101.0))
    assert [why for _, why in roster.expired(102.0)] == ["node a was silent for 2 s"]


def test_a_living_process_that_the_plan_left_idle_may_come_back_on_another_connection():
    world = started(gain=0.5)
    idle = world.team()[0]
    world.say(idle.connection, Leaving())  # the change that leaves it out comes, and the process lives on
    world.pass_time(1)
    assert members(world) == ["a:1", "b:0"]
    world.do(world.machine.disconnect(idle.connection, world.now_s))
    world.register(idle)
    assert (idle.alive, idle.end) == (True, None)


def test_a_process_that_comes_after_the_end_hears_of_the_end():
    world = started(fits=lambda devices: len(devices) >= 3)
    world.die(world.team()[0])
    world.pass_time(30)
    assert world.machine.phase is Phase.ENDED
    late = world.start("c:0")
    assert isinstance(late.end, Ended)
    assert late.end.why == world.machine.status().why


def test_a_planner_that_never_answers_does_not_hold_the_survivors_for_ever():
    world = started()
    world.plan = lambda: None
    world.die(world.team()[0])
    world.pass_time(world.settings.plan_s - 1)
    assert world.machine.phase is Phase.PLANNING
    world.pass_time(2)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.WAITING, 1)
    del world.plan
    world.pass_time(0.5)  # it answers after all
    assert (world.machine.phase, world.machine.history.generation) == (Phase.TRAINING, 2)


def test_a_planner_that_fails_is_asked_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("launch.coordinator.server.FIRST_RETRY_S", 0.01)
    calls, answer = [], None

    def plan_for(devices, running):
        calls.append(devices)
        if len(calls) < 4:
            raise ZeroDivisionError("a bug of the planner")
        return answer

    class Machine:
        def __init__(self):
            self.answers = []

        def wants(self, number):
            return number == 7

        def planned(self, number, offer, now_s):
            self.answers.append((number, offer))
            return []

    async def ask():
        server = Server(Settings(devices=("a:0",)), Journalless(), plan_for, TOKEN)
        server._machine = Machine()
        await server._plan(7, ("a:0",), None)
        await server._plan(6, ("a:0",), None)  # nobody wants it any more: asked once
        return server._machine.answers

    assert asyncio.run(ask())[0] == (7, None)
    assert len(calls) == 5
    assert caplog.text.count("a bug of the planner") >= 3


class Journalless:
    history = History()


# ---- the clients


@pytest.fixture
def coordinator(tmp_path):
    found = Coordinator(tmp_path, ("a:0", "a:1"))
    try:
        yield found
        assert "Traceback" not in found.log
    finally:
        found.kill()


@pytest.fixture
def pair(coordinator):
    with (
        MemberClient(coordinator.address, TOKEN, "a:0") as first,
        MemberClient(coordinator.address, TOKEN, "a:1") as second,
    ):
        for client in (first, second):
            client.wait_record(0, 10)
            client.ready()
        assert first.wait_completed(1, 10)
        yield first, second


def test_a_failure_that_is_told_while_the_line_is_down_is_told_again(coordinator, pair):
    coordinator.kill()
    pair[0].failed("connection reset\nby peer")
    coordinator.start()
    assert pair[1].wait_stop(10) == Freeze(generation=1, why="a:0 failed: connection reset")


def test_who_waits_for_a_stop_hears_of_the_end(pair):
    pair[0]._hear(Ended(why="no plan fits"))
    with pytest.raises(JobEndedError, match="no plan fits"):
        pair[0].wait_stop(10)


def test_a_process_that_a_newer_record_does_without_hears_so(pair):
    first, second = pair
    record = Record(generation=2, members=(second.member,), plan=plan_of(("a:1",)), why="a change")
    first._hear(Published(record=record))
    second._hear(Published(record=record))
    with pytest.raises(LeftOutError, match="generation 2 does without a:0"):
        first.wait_record(1, 10)
    assert second.wait_record(1, 1).generation == 2


def test_a_word_for_a_line_that_has_just_ended_is_dropped(coordinator, monkeypatch):
    client = MemberClient(coordinator.address, TOKEN, "a:0")
    client.close()
    monkeypatch.setattr(client._line._thread, "is_alive", lambda: True)  # it was, a moment ago
    client.leaving()
    client.close()


def test_a_line_that_is_closed_at_any_moment_leaves_no_socket(coordinator, monkeypatch):
    """Which pytest would tell as an error, of the next test that collects garbage."""
    left = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: left.append(str(told.exc_value)))
    moments = random.Random(0)
    for number in range(100):
        token = TOKEN if number % 2 else new_token()
        client = MemberClient(coordinator.address, token, "a:0")
        time.sleep(moments.random() * 0.02)
        client.close()
    del client
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        gc.collect()
    assert left == []


def test_an_end_takes_a_process_out_of_its_step(pair):
    stops = []
    pair[0]._on_stop = stops.append
    pair[0]._hear(Refused(why="declared dead"))
    assert stops == [Freeze(generation=1, why="a:0: declared dead")] == [pair[0].stop]
