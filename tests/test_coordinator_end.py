"""The end of a job, and what a person sees of it: members that are done are no deaths."""

import pytest

from arachne_runtime.membership.client import AgentClient, JobDoneError, JobEndedError, MemberClient
from arachne_runtime.membership.messages import Ended, Failed, Leaving, Progress
from launch.coordinator.phase import Phase

from .coordinator_process import TOKEN, Coordinator
from .coordinator_world import World
from .test_coordinator import members, started


@pytest.mark.parametrize("way", ["done", "exit", "both"])
def test_one_that_ends_before_another_stops_nobody(way):
    world = started()
    joiner = world.start("c:0")
    world.pass_time(1)
    team = world.team()
    generation = world.machine.history.generation
    for worker in team:
        if way != "exit":
            world.finish(worker)
        if way != "done":
            world.die(worker, code=0)
        if worker is not team[-1]:
            world.pass_time(5)  # longer than it takes to be declared dead
            assert (world.machine.phase, world.machine.history.generation) == (Phase.TRAINING, generation)
    assert world.machine.phase is Phase.ENDED
    assert world.machine.status().why == "the script is done"
    assert joiner in team


def test_idle_processes_hear_that_the_job_is_done():
    world = started(gain=1.0)
    idle = world.start("c:0")
    for worker in world.team():
        world.finish(worker)
    assert idle.end == Ended(why="the script is done", is_done=True)


def test_a_death_after_some_are_done_goes_on_with_the_others():
    world = started()
    first, second, third = world.team()
    world.finish(first)
    world.die(first, code=0)
    world.die(second)
    world.pass_time(1)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.WAITING, 1)  # one fits no plan
    world = started(fits=lambda devices: True)
    first, second, third = world.team()
    world.finish(first)
    world.die(second)
    world.pass_time(1)
    assert members(world) == [third.member.device]
    world.finish(third)
    assert world.machine.phase is Phase.ENDED


def test_a_death_after_all_others_are_done_ends_the_job():
    world = started()
    first, second, third = world.team()
    world.finish(first)
    world.finish(second)
    world.die(third)
    world.pass_time(1)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.ENDED, 1)
    assert world.machine.status().why == f"{third.member.device} exited with code -9; all others are done"


def test_an_exit_with_0_in_the_middle_is_a_loss_once_another_says_so():
    world = started()
    first, second, third = world.team()
    world.step()
    world.die(first, code=0)
    world.pass_time(3)
    assert world.machine.history.generation == 1
    world.say(second.connection, Failed(generation=1, why="connection reset"))
    world.pass_time(1)
    assert members(world) == [second.member.device, third.member.device]


def test_no_change_begins_once_one_is_done():
    world = started()
    first, *others = world.team()
    world.finish(first)
    world.start("c:0")
    world.pass_time(1)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.TRAINING, 1)
    for worker in others:
        world.finish(worker)
    assert world.machine.phase is Phase.ENDED


def test_a_change_that_meets_the_end_of_the_script():
    world = started()
    first, *others = world.team()
    for worker in others:
        worker.stop = list  # takes no step any more in which it could stop
    world.say(first.connection, Leaving())
    world.pass_time(1)
    assert world.machine.phase is Phase.CHANGING
    for worker in world.team():
        world.finish(worker)
    assert world.machine.phase is Phase.ENDED


def test_a_restarted_coordinator_hears_again_who_is_done():
    world = started()
    first, *others = world.team()
    world.die(first, code=0)
    world.finish(others[0])
    world.restart()
    world.pass_time(8)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.TRAINING, 1)
    world.finish(others[1])
    assert world.machine.phase is Phase.ENDED


def test_progress_is_what_the_first_member_says():
    world = started()
    first, second, _ = world.team()
    world.say(first.connection, Progress(generation=1, step=7, samples_per_s=12.5))
    world.say(second.connection, Progress(generation=1, step=8, samples_per_s=99.0))
    world.say(first.connection, Progress(generation=3, step=9, samples_per_s=99.0))
    status = world.machine.status()
    assert (status.step, status.samples_per_s) == (7, 12.5)
    assert status.plan == "1 pipeline of 1 stage, 3 devices"
    world.die(second)
    world.pass_time(1)
    assert (world.machine.status().step, world.machine.status().samples_per_s) == (7, 0.0)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_progress_that_cannot_be_is_ignored(rate):
    world = started()
    world.say(world.team()[0].connection, Progress(generation=1, step=7, samples_per_s=rate))
    assert (world.machine.status().step, "ignored" in world.log[-1]) == (0, True)


def test_clients_report_progress_and_the_end(tmp_path):
    coordinator = Coordinator(tmp_path, ("a:0", "a:1"))
    try:
        with (
            AgentClient(coordinator.address, TOKEN, "a") as agent,
            MemberClient(coordinator.address, TOKEN, "a:0") as first,
            MemberClient(coordinator.address, TOKEN, "a:1") as second,
        ):
            for client in (first, second):
                client.wait_record(0, 10)
                client.ready()
            assert first.wait_completed(1, 10)
            for step in range(1, 1000):
                first.progress(step, 10.0)
                second.progress(step, 10.0)
            assert first._line._said < 10  # once a second
            first.done()
            assert coordinator.status().phase == "training"
            second.done()
            second.close()
            with pytest.raises(JobDoneError, match="the script is done") as raised:
                first.wait_stop(10)
            assert isinstance(raised.value, JobEndedError)
            assert agent.wait_ended(10) == Ended(why="the script is done", is_done=True)
            assert (coordinator.status().phase, coordinator.status().step) == ("ended", 1)
    finally:
        coordinator.kill()


def test_the_end_is_journalled_and_another_coordinator_knows_it():
    world = started()
    for worker in world.team():
        world.die(worker)
    world.pass_time(World.settings.joiner_s + 10)
    end = world.journal[-1]
    assert (type(end), end.is_done) == (Ended, False)
    assert end.why.startswith("no plan fits")
    world.restart()
    assert (world.machine.phase, world.machine.status().why) == (Phase.ENDED, end.why)
    assert world.start("a:0").end == end
