"""Devices that compute slower than their profile says: who departs, and the plan that follows."""

import time
from functools import cache

import pytest

from arachne_runtime.membership.client import AgentClient, MemberClient
from arachne_runtime.membership.messages import Costs
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.rules import check_plan
from launch.coordinator.drift import NUM_WORDS, Drift
from launch.coordinator.offers import Offers
from launch.coordinator.phase import Phase
from launch.coordinator.planner_words import Problem, Question
from launch.coordinator.slowed import Slowed, slowed_type
from launch.coordinator.worth import Offer, pays
from planner import Request, catalog, find_plan, signed

from .coordinator_process import TOKEN, Coordinator
from .coordinator_world import plan_of
from .test_coordinator import started


def told(drift: Drift, words: int = NUM_WORDS, **seconds: float) -> bool:
    """Whether anything moved after so many words of each device."""
    moved = False
    for _ in range(words):
        for name, each in seconds.items():
            drift.hear(f"{name[0]}:{name[1:]}", each)
        moved = drift.moved() or moved
    return moved


def four() -> Drift:
    drift = Drift()
    drift.expect({"a:0": 1.0, "a:1": 2.0, "b:0": 1.0, "b:1": 4.0})
    return drift


def test_one_that_is_slower_for_long_enough_departs_once():
    drift = four()
    assert not told(drift, NUM_WORDS - 1, a0=1.0, a1=6.0, b0=1.05, b1=4.1)
    assert told(drift, 1, a0=1.0, a1=6.0, b0=1.05, b1=4.1)
    assert drift.slower == {"a:1": 3.0}
    assert drift.why == "a:1 takes 3 times as long as its profile says"
    assert not told(drift, 10, a0=1.0, a1=6.0, b0=1.05, b1=4.1)


def test_it_comes_back():
    drift = four()
    assert told(drift, a0=1.0, a1=6.0, b0=1.0, b1=4.0)
    drift.expect({"a:0": 1.5, "a:1": 3.0, "b:0": 1.5, "b:1": 6.0})  # another plan, with the slow device
    assert not told(drift, 5, a0=1.5, a1=3.0, b0=1.5, b1=6.0)
    assert told(drift, a0=1.5, a1=1.0, b0=1.5, b1=6.0)
    assert (drift.slower, drift.why) == ({}, "a:1 computes as its profile says again")


@pytest.mark.parametrize(
    "seconds",
    [
        {"a0": 1.1, "a1": 1.8, "b0": 0.95, "b1": 4.5},  # noise
        {"a0": 2.0, "a1": 4.0, "b0": 2.1, "b1": 8.2},  # a profile that is off for all alike
        {"a0": 1.0, "a1": 9.0, "b0": 1.0},  # one says nothing
    ],
)
def test_nothing_follows(seconds):
    drift = four()
    assert not told(drift, 10, **seconds)
    assert drift.slower == {}


def test_one_word_among_others_is_noise():
    drift = four()
    for second in (2.0, 9.0, 2.0, 2.0, 9.0, 2.0, 0.1):
        assert not told(drift, 1, a0=1.0, a1=second, b0=1.0, b1=4.0)


def test_with_an_unknown_plan_nothing_is_told():
    drift = Drift()
    drift.expect({})
    assert not told(drift, 5, a0=1.0)


# ---- in the coordinator


def test_a_drifting_device_leads_to_a_better_plan():
    world = started()
    asked = []

    def plan():
        while world.asked:
            ask = world.asked.popleft()
            asked.append(ask)
            slow = ask.slower.get("a:1", 1.0)
            offer = Offer(
                plan=plan_of(tuple(d for d in ask.devices if slow < 2 or d != "a:1")),
                samples_per_s=3.0 if slow < 2 else 2.0,
                running_samples_per_s=3.0 / slow,
                running_compute_s={"a:0": 1.0, "a:1": slow, "b:0": 1.0},
                compute_s={"a:0": 1.5, "b:0": 1.5},
            )
            world.do(world.machine.planned(ask.number, offer, world.now_s))

    world.plan = plan
    world.start("c:0")  # a question whose answer says what each computes
    world.pass_time(0.5)
    assert [ask.slower for ask in asked] == [{}]
    for _ in range(NUM_WORDS):
        for worker in world.team():
            seconds = 3.0 if worker.member.device == "a:1" else 1.0
            world.say(worker.connection, Costs(generation=1, compute_s=seconds))
        world.pass_time(0.5)
    assert [ask.slower for ask in asked] == [{}, {"a:1": 3.0}]
    record = world.machine.history.record
    assert (world.machine.phase, record.generation) == (Phase.TRAINING, 2)
    assert "a:1" not in record.plan.devices
    assert record.why == "a:1 takes 3 times as long as its profile says"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_that_no_clock_gives_are_ignored(seconds):
    world = started()
    world.say(world.team()[0].connection, Costs(generation=1, compute_s=seconds))
    assert "ignored" in world.log[-1]


# ---- in the planner


@cache
def problem(*, cpus: bool = False) -> Problem:
    model = catalog.model("opt-350m")
    entry = NodeEntry(name="a", device="A100-40", gpus=4)
    cluster = Cluster(node=(entry,), network=Network(inter_GBps=12.5))
    profile = catalog.profile_for(model, ["A100-40"])
    request = Request(cluster=cluster, model=model, profile=profile, global_batch=64)
    first = signed(find_plan(request, evaluations=40), request, version="0")
    return Problem(
        cluster=cluster, model=model, profile=profile, first=first, hurried_s=0.2, patient_s=0.5, pause_s=0.5
    )


def test_a_slow_device_is_given_less_and_the_running_plan_priced_with_it():
    first = problem().first
    slow = first.devices[0]
    question = Question(number=1, devices=problem().cluster.devices, running=first)
    before = Offers(problem()).answer(question).offer
    after = (
        Offers(problem())
        .answer(Question(number=2, devices=question.devices, running=first, slower={slow: 3.0}))
        .offer
    )
    assert after.running_compute_s[slow] == pytest.approx(3 * before.running_compute_s[slow], rel=1e-6)
    others = [d for d in first.devices if d != slow]
    assert [after.running_compute_s[d] for d in others] == [before.running_compute_s[d] for d in others]
    assert after.running_samples_per_s < 0.8 * before.running_samples_per_s
    assert pays(after, 600)
    assert not check_plan(after.plan, cluster=problem().cluster, model=problem().model)
    assert after.compute_s.get(slow, 0.0) < after.running_compute_s[slow]
    assert set(after.plan.made_by.device_types) <= {"a"}


def test_types_of_slowed_devices():
    assert slowed_type("A100-40", 2.5) == "A100-40*2.5"
    assert slowed_type("cpu", 2.0) == "cpu-0.5"
    assert slowed_type("cpu-0.3", 3.0) == "cpu-0.1"
    cluster = problem().cluster
    slowed = Slowed(cluster, {"a:1": 2.5, "gone:0": 9.0})
    profile = slowed.profile(problem().profile, problem().model)
    assert {row.device for row in profile.timings} == {"A100-40", "A100-40*2.5"}
    entry = slowed.described(cluster.node[0], slowed.type_of("a:1"))
    assert (entry.device, entry.intra_GBps is not None) == ("A100-40*2.5", True)
    assert 39 < entry.memory_GiB < 40


# ---- on the wire


def test_each_member_tells_its_costs_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("arachne_runtime.membership.client.COSTS_S", 0.05)
    coordinator = Coordinator(tmp_path, ("a:0", "a:1"))
    try:
        with (
            AgentClient(coordinator.address, TOKEN, "a"),
            MemberClient(coordinator.address, TOKEN, "a:0") as first,
            MemberClient(coordinator.address, TOKEN, "a:1") as second,
        ):
            said = []
            second._line.say = said.append
            for client in (first, second):
                client.wait_record(0, 10)
            for step, seconds in enumerate([90.0, 90.0, 1.0, 2.0, 40.0, 3.0, 2.0], 1):
                second.progress(step, 10.0, seconds)  # the first two of a generation are slow
            assert said == []
            time.sleep(0.06)
            second.progress(8, 10.0, 2.0)
            assert said == [Costs(generation=1, compute_s=2.0)]
            time.sleep(0.06)
            second.progress(9, 10.0, 5.0)
            assert said[1:] == [Costs(generation=1, compute_s=5.0)]
            time.sleep(0.06)
            second.progress(10, 10.0)  # nobody measured it
            assert len(said) == 2
    finally:
        coordinator.kill()
