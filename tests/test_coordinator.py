"""The coordinator's state machine: examples, and every invariant under random events."""

import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arachne_runtime.membership.decision import Report, Verdict
from arachne_runtime.membership.messages import (
    AskStatus,
    Beat,
    Costs,
    Exited,
    Failed,
    Frozen,
    Leaving,
    MemberHello,
    Progress,
    Stopped,
)
from launch.coordinator.phase import Phase
from launch.coordinator.registration import why_not
from launch.coordinator.worth import Offer, pays

from .coordinator_world import World, plan_of


def started(**changes) -> World:
    world = World(**changes)
    for device in world.settings.devices:
        world.start(device)
    world.pass_time(0.5)
    assert world.machine.history.is_completed
    return world


def members(world) -> list[str]:
    return [member.device for member in world.machine.history.record.members]


def test_the_job_begins_when_its_devices_are_there():
    world = World()
    world.start("a:0")
    world.start("a:1")
    world.pass_time(2)
    assert (world.machine.phase, world.journal) == (Phase.GATHERING, [])
    world.start("b:0")
    world.pass_time(0.5)
    assert (world.machine.phase, members(world)) == (Phase.TRAINING, ["a:0", "a:1", "b:0"])
    record = world.machine.history.record
    assert (record.generation, record.source, record.decision) == (1, None, None)


def test_who_comes_while_others_wait_for_a_plan_does_not_make_them_wait_longer():
    world = started()
    world.die(world.team()[2])
    assert world.machine.phase is Phase.PLANNING
    world.start("c:0")
    world.plan()
    assert (world.machine.phase, members(world)) == (Phase.TRAINING, ["a:0", "a:1"])
    world.pass_time(1)
    assert members(world) == ["a:0", "a:1", "c:0"]


def test_a_death_leads_to_a_generation_of_the_survivors_and_one_decision():
    world = started()
    world.step()
    world.step(applied=1)
    world.die(world.team()[2])
    world.pass_time(0.5)
    record = world.machine.history.record
    assert (record.generation, members(world), record.source.generation) == (2, ["a:0", "a:1"], 1)
    assert (record.decision.verdict, record.decision.step, record.decision.flags.step) == (
        Verdict.APPLY,
        2,
        2,
    )
    assert record.why == "b:0 exited with code -9"
    assert {worker.applied for worker in world.team()} == {2}


@pytest.mark.parametrize(("seconds", "dead"), [(1.5, False), (2.5, True)])
def test_a_silent_node_is_suspected_and_then_dead(seconds, dead):
    world = started()
    world.silent.add("b")
    world.pass_time(seconds)
    assert "node b has been silent for 0.5 s" in world.log
    assert ("b:0" in members(world)) is not dead
    assert (world.machine.status().suspected == ("b",)) is not dead
    world.silent.clear()
    world.pass_time(3)
    assert ("node b is heard again" in world.log) is not dead


def test_a_stopped_process_is_out_and_stays_out_when_it_wakes():
    world = started()
    victim = world.team()[1]
    stopped = Stopped(device="a:1", incarnation=victim.member.incarnation)
    world.say(world.agent("a"), stopped)
    world.pass_time(1)
    assert members(world) == ["a:0", "b:0"]
    assert not victim.alive  # it came back, was refused and ended
    world.start("a:1")
    world.pass_time(1)
    assert members(world) == ["a:0", "a:1", "b:0"]


def test_a_plan_made_in_a_hurry_is_looked_at_again_once_they_train():
    world = started(gain=1.0)
    world.die(world.team()[2])
    asked = []
    plan, world.plan = world.plan, lambda: (asked.extend(world.asked), plan())
    world.pass_time(3)
    assert [(ask.devices, ask.running is not None) for ask in asked] == [(("a:0", "a:1"), True)] * 2
    assert (world.machine.history.generation, world.machine.history.is_completed) == (2, True)


def test_a_joiner_comes_at_a_step_end_where_it_pays():
    world = started()
    world.step()
    world.start("c:0")
    world.pass_time(1)
    record = world.machine.history.record
    assert "c:0" in members(world)
    assert len(record.holders) == 3
    assert (record.decision.verdict, record.decision.step) == (Verdict.APPLY, 1)


def test_a_joiner_stays_idle_where_it_does_not():
    world = started(gain=1.0)
    world.start("c:0")
    world.pass_time(1)
    assert world.machine.history.generation == 1
    assert world.machine.status().idle == ("c:0",)
    assert not world.asked
    assert any("no change for a:0" in line for line in world.log)


def test_notice_of_the_end_leads_to_a_change_though_it_costs():
    world = started(gain=0.5)
    world.say(world.team()[0].connection, Leaving())
    world.pass_time(1)
    assert (members(world), world.machine.history.record.why) == (["a:1", "b:0"], "a device leaves")


def test_a_failed_collective_freezes_all_and_they_go_on_together():
    world = started()
    world.say(world.team()[0].connection, Failed(generation=1, why="connection reset"))
    world.pass_time(0.5)
    assert (world.machine.history.generation, len(members(world))) == (2, 3)
    assert world.machine.history.record.why == "a:0 failed: connection reset"


def test_survivors_that_no_plan_fits_wait_and_then_end():
    for joins in (True, False):
        world = started(fits=lambda devices: len(devices) >= 3)
        world.die(world.team()[0])
        world.pass_time(5)
        assert world.machine.phase is Phase.WAITING
        if joins:
            world.start("c:0")
        world.pass_time(20)
        assert world.machine.phase is (Phase.TRAINING if joins else Phase.ENDED)
        assert any(worker.alive for worker in world.workers) is joins


def test_a_restart_waits_for_those_it_knew_and_no_longer():
    world = started()
    world.restart()
    world.pass_time(0.5)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.TRAINING, 1)
    world.die(world.team()[2], told=False)
    world.restart()
    world.pass_time(4.5)
    assert world.machine.phase is Phase.RECOVERING
    world.pass_time(1)
    assert (members(world), world.machine.history.record.why) == (["a:0", "a:1"], "b:0 did not come back")


def test_a_generation_that_was_not_completed_is_no_source():
    world = started()
    world.step()
    world.start("c:0").hear = lambda message: []  # never gets its parts
    world.pass_time(2)
    assert (world.machine.history.generation, world.machine.history.is_completed) == (2, False)
    world.pass_time(5)
    record = world.machine.history.record
    assert (record.generation, record.source.generation) == (3, 1)
    assert {worker.applied for worker in world.team()} == {1}


def test_what_is_not_a_connections_to_say_changes_nothing():
    world = started()
    worker = world.team()[0]
    before = world.machine.status()
    for connection, message in [
        (worker.connection, Beat()),
        (worker.connection, Exited(device="a:1", incarnation=world.team()[1].member.incarnation, code=0)),
        (world.agent("b"), Exited(device="a:1", incarnation=world.team()[1].member.incarnation, code=0)),
        (world.agent("a"), Exited(device="a:1", incarnation="another", code=0)),
        (world.connect(), Failed(generation=1, why="a stranger")),
        (worker.connection, Failed(generation=7, why="not yet")),
        (worker.connection, Frozen(generation=1, report=Report(applied=3, entered=1))),
    ]:
        lines = len(world.log)
        world.say(connection, message)
        assert "ignored" in world.log[lines]
    world.say(world.connect(), AskStatus())
    assert world.machine.status() == before


def test_an_answer_to_an_older_question_is_of_no_use():
    world = started()
    world.start("c:0")  # what if it joined?
    (what_if,) = world.asked
    world.die(world.team()[2])
    offer = Offer(plan=plan_of(what_if.devices), samples_per_s=9)
    world.do(world.machine.planned(what_if.number, offer, world.now_s))
    assert world.machine.history.generation == 1
    world.pass_time(0.5)
    assert members(world) == ["a:0", "a:1", "c:0"]


@pytest.mark.parametrize(
    ("device", "generation", "words"),
    [
        ("a:0", 1, "generation 1 went on without it"),
        ("a:0", 4, "generation 4 is not in this coordinator's journal"),
        ("a", 0, "'a' is no device"),
        ("a:-1", 0, "'a:-1' is no device"),
        ("a:0", 0, None),
    ],
)
def test_who_may_register(device, generation, words):
    history = started().machine.history
    hello = MemberHello(device=device, incarnation="another", generation=generation)
    fault = why_not(hello, history, dead=set())
    assert fault is None if words is None else words in fault


def test_reports_that_no_job_gives_end_it():
    world = started()
    world.step()
    first = world.team()[0]
    first.applied = first.entered = 5
    first.flags = None
    world.die(world.team()[2])
    world.pass_time(0.5)
    assert (world.machine.phase, world.machine.history.generation) == (Phase.ENDED, 1)
    assert "different states" in world.log[-1]


def test_a_change_pays_by_samples_within_the_horizon():
    offer = Offer(plan=plan_of(("a:0",)), samples_per_s=110, running_samples_per_s=100, migration_s=50)
    assert pays(offer, 600)
    assert not pays(offer, 500)
    assert not pays(offer, 10)


class Chaos(RuleBasedStateMachine):
    """Whatever comes, the records form one history, and once it is calm those that live train."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        for device in self.world.settings.devices:
            self.world.start(device)

    def worker(self, number):
        alive = [worker for worker in self.world.workers if worker.alive]
        return alive[number % len(alive)] if alive else None

    @rule(device=strategies.sampled_from(["a:0", "a:1", "b:0", "b:1", "c:0"]))
    def start(self, device):
        self.world.start(device)

    @rule(number=strategies.integers(0, 9), told=strategies.booleans())
    def die(self, number, told):
        if worker := self.worker(number):
            self.world.die(worker, told)

    @rule(number=strategies.integers(0, 9))
    def lose_connection(self, number):
        if (worker := self.worker(number)) and worker.connection is not None:
            connection, worker.connection = worker.connection, None
            self.world.do(self.world.machine.disconnect(connection, self.world.now_s))

    @rule(number=strategies.integers(0, 9))
    def fail_or_leave(self, number):
        if (worker := self.worker(number)) and worker.connection is not None:
            failed = Failed(generation=worker.generation, why="connection reset")
            self.world.say(worker.connection, failed if number % 2 else Leaving())

    @rule(number=strategies.integers(0, 9), way=strategies.integers(0, 11))
    def progress_or_end(self, number, way):
        if not (worker := self.worker(number)):
            return
        if way == 0:
            self.world.finish(worker)
        elif way == 1:
            self.world.die(worker, code=0)
        elif worker.connection is not None:
            told = Progress(generation=worker.generation, step=worker.applied, samples_per_s=1.0)
            self.world.say(worker.connection, told)
            costs = Costs(generation=worker.generation, compute_s=1.0 + (number % 2) * 4.0)
            for _ in range(way):
                self.world.say(worker.connection, costs)

    @rule(node=strategies.sampled_from("abc"))
    def go_silent_or_speak(self, node):
        self.world.silent ^= {node}

    @rule(applied=strategies.none() | strategies.integers(0, 3))
    def step(self, applied):
        self.world.step(applied)

    @rule()
    def plan(self):
        self.world.plan()

    @rule()
    def restart(self):
        self.world.restart()

    @rule(seconds=strategies.sampled_from([0.25, 1.0, 2.5, 6.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    @invariant()
    def generations_are_counted(self):
        assert list(self.world.records) == list(range(1, len(self.world.records) + 1))
        for record in self.world.records.values():
            assert [member.device for member in record.members] == list(record.plan.devices)
            assert (record.decision is not None) == (record.source is not None)

    @invariant()
    def the_dead_never_come_back(self):
        gone = set()
        for record, following in zip(
            self.world.records.values(), [*self.world.records.values()][1:], strict=False
        ):
            gone |= set(record.holders) - set(following.members) - set(following.holders)
            assert not gone & set(following.holders)

    def teardown(self):
        self.world.silent.clear()
        self.world.pass_time(15)
        machine, alive = self.world.machine, [w.member for w in self.world.workers if w.alive]
        if machine.phase is Phase.TRAINING:
            assert machine.history.is_completed
            done = machine._roster.done
            assert {m for m in machine.history.record.members if m.incarnation not in done} <= set(alive)
            steps = {worker.applied for worker in self.world.team() if worker.holds}
            assert max(steps) - min(steps) <= 1
        else:
            few = len(self.world.machine._roster.devices) < 2
            assert machine.phase in (Phase.GATHERING, Phase.WAITING, Phase.ENDED)
            assert few or machine.phase is not Phase.WAITING


TestChaos = Chaos.TestCase
TestChaos.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
)
