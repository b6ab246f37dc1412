"""The planner's process: offers on the devices that are there, and what comes of its errors and its death."""

import asyncio
import io
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest

from arachne_runtime.membership.channel import new_token
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import Pipeline, Replica, Stage
from arachne_runtime.plan.rules import check_plan
from launch.coordinator.journal import Journal
from launch.coordinator.offers import Offers
from launch.coordinator.planner_words import Answer, Problem, Question, SupersededError
from launch.coordinator.planning import Planner, PlannerError, _Child
from launch.coordinator.server import FIRST_RETRY_S, Server
from launch.coordinator.settings import Settings
from launch.coordinator.shrink import shrunk
from launch.coordinator.worth import pays
from planner import Request, catalog, find_plan, signed
from planner.cost import price

CLUSTER = Cluster(
    node=(
        NodeEntry(name="a", device="A100-40", gpus=2, count=2),
        NodeEntry(name="b", device="V100-16", gpus=3),
    ),
    network=Network(inter_GBps=12.5),
)


@cache
def problem() -> Problem:
    model = catalog.model("opt-350m")
    profile = catalog.profile_for(model, ["A100-40", "V100-16"])
    request = Request(cluster=CLUSTER, model=model, profile=profile, global_batch=64)
    first = signed(find_plan(request, evaluations=40), request, version="0")
    return Problem(
        cluster=CLUSTER, model=model, profile=profile, first=first, hurried_s=0.1, patient_s=0.3, pause_s=0.5
    )


def without(*gone: str) -> tuple[str, ...]:
    return tuple(device for device in CLUSTER.devices if device not in gone)


@pytest.mark.parametrize("gone", [("a-0:0",), ("b:1",), ("a-0:1", "a-1:0"), ("b:0", "b:1", "b:2")])
def test_an_offer_uses_what_is_there_and_is_no_worse_than_what_is_left(gone):
    first = problem().first
    answer = Offers(problem()).answer(Question(number=3, devices=without(*gone), running=first))
    plan = answer.offer.plan
    assert (answer.number, answer.no_plan, answer.fault) == (3, "", "")
    assert set(plan.devices) <= set(without(*gone))
    assert not check_plan(plan, cluster=CLUSTER, model=problem().model)
    assert plan.global_batch == first.global_batch
    request = Request(
        cluster=CLUSTER, model=problem().model, profile=problem().profile, global_batch=first.global_batch
    )
    assert price(plan, request).samples_per_s == pytest.approx(answer.offer.samples_per_s, rel=1e-6)
    left = shrunk(first, frozenset(without(*gone)))
    if left is not None and not set(first.devices) <= set(without(*gone)):
        assert answer.offer.samples_per_s >= 0.98 * price(left.plan, request).samples_per_s
    assert answer.offer.running_samples_per_s == 0 or set(first.devices) <= set(without(*gone))


def test_a_job_begins_with_the_plan_that_it_was_given():
    lone = _one_device("a-0:0")  # no search would have it
    uneven = msgspec.structs.replace(problem().first, pipelines=lone, predicted=None)
    own = msgspec.structs.replace(problem(), first=uneven)
    every = Offers(own).answer(Question(number=1, devices=CLUSTER.devices)).offer
    assert every.plan == uneven
    assert every.compute_s.keys() == {"a-0:0"}
    fewer = Offers(own).answer(Question(number=2, devices=without("a-0:0"))).offer
    assert fewer.plan != uneven
    later = Offers(own).answer(Question(number=3, devices=CLUSTER.devices, running=uneven)).offer
    assert later.samples_per_s > every.samples_per_s


def _one_device(device: str) -> tuple[Pipeline, ...]:
    blocks = len(problem().model.blocks)
    stage = Stage(layers=(0, blocks), recompute=True, replicas=(Replica(devices=(device,), share=1),))
    return (Pipeline(micro_batches=64, micro_batch=1, stages=(stage,)),)


def test_both_plans_are_priced_alike_and_a_change_has_its_price():
    fewer = Offers(problem()).answer(
        Question(number=1, devices=without("a-0:0", "a-0:1"), running=problem().first)
    )
    back = Offers(problem()).answer(Question(number=2, devices=CLUSTER.devices, running=fewer.offer.plan))
    assert back.offer.running_samples_per_s == pytest.approx(fewer.offer.samples_per_s, rel=1e-6)
    assert back.offer.samples_per_s > back.offer.running_samples_per_s
    assert back.offer.migration_s > 0.5  # the pause, and bytes
    assert pays(back.offer, 600)


def test_the_running_plan_is_given_back_as_it_is_where_nothing_is_better():
    found = Offers(problem()).answer(Question(number=1, devices=CLUSTER.devices, running=problem().first))
    running = found.offer.plan
    again = Offers(problem()).answer(
        Question(number=2, devices=(*CLUSTER.devices, "nowhere:0"), running=running)
    )
    if again.offer.plan == running:
        assert again.offer.migration_s == 0
    else:
        assert pays(again.offer, 600)
    impossible = msgspec.structs.replace(problem(), pause_s=1e6)
    kept = Offers(impossible).answer(Question(number=3, devices=CLUSTER.devices, running=running))
    assert kept.offer.plan == running


def test_what_cannot_be_planned_is_told_apart_from_a_fault():
    tight = msgspec.structs.replace(
        problem(),
        cluster=Cluster(
            node=(NodeEntry(name="a", device="A100-40", gpus=1, memory_GiB=1.1),),
            network=Network(inter_GBps=1.0),
        ),
    )
    assert "memory" in Offers(tight).answer(Question(number=1, devices=("a:0",))).no_plan
    none = Offers(problem()).answer(Question(number=2, devices=("elsewhere:0",)))
    assert none.no_plan == "none of the devices is in the cluster file"
    other = msgspec.structs.replace(problem().first, global_batch=65)
    with pytest.raises(ValueError, match="global batch"):
        Offers(problem()).answer(Question(number=3, devices=CLUSTER.devices, running=other))


def test_a_search_is_given_up_for_a_newer_question():
    question = Question(number=1, devices=CLUSTER.devices, running=problem().first)
    offers = Offers(problem(), is_superseded=lambda: True)
    with pytest.raises(SupersededError):
        offers.answer(question)


def test_the_process_answers_while_others_work_and_survives_its_death():
    with Planner(problem()) as planner:
        first = problem().first
        cold = planner.plan_for(without("b:0"), first)
        assert set(cold.plan.devices) <= set(without("b:0"))
        beats, over = [], threading.Event()

        def beat():
            while not over.wait(0.01):
                beats.append(time.monotonic())

        thread = threading.Thread(target=beat)
        thread.start()
        assert planner.plan_for(CLUSTER.devices, cold.plan) is not None
        over.set()
        thread.join()
        assert max(after - before for before, after in pairwise(beats)) < 0.2
        child = planner._child.pid
        killer = threading.Timer(0.1, os.kill, (child, signal.SIGKILL))
        killer.start()
        assert planner.plan_for(CLUSTER.devices, cold.plan) is not None  # asked again of another process
        killer.join()
        assert planner._child.pid != child
        tooth = planner.plan_for(("a-0:0",), None)
        assert tooth.plan.devices == ("a-0:0",)


def test_one_that_is_closed_in_the_middle_of_a_question_starts_no_other_process():
    def ask():
        with suppress(PlannerError):  # and nothing may be left of the plan
            planner.plan_for(without("b:0"), problem().first)

    with Planner(problem()) as planner:
        asked = threading.Thread(target=ask)
        asked.start()
        while not planner._child._waiting:
            time.sleep(0.001)
        child = planner._child.pid
        planner.close()
        asked.join(5)
        assert (asked.is_alive(), planner._child.pid) == (False, child)


def test_a_planner_that_hangs_or_fails_leaves_what_is_left_of_the_plan():
    whole = Stage(layers=(0, len(problem().model.blocks)), replicas=(Replica(devices=("a-0:0",), share=4),))
    other = msgspec.structs.replace(whole, replicas=(Replica(devices=("b:0",), share=4),))
    pipelines = [Pipeline(micro_batches=8, micro_batch=4, stages=(stage,)) for stage in (whole, other)]
    first = msgspec.structs.replace(problem().first, pipelines=tuple(pipelines), predicted=None)
    pair = msgspec.structs.replace(problem(), first=first)
    expected = shrunk(first, {"a-0:0"}).plan
    with Planner(pair, answer_s=0.3) as planner:
        os.kill(planner._child.pid, signal.SIGSTOP)
        assert (
            planner.plan_for(without("b:0"), first).plan == expected
        )  # the next process is not warm by then
    with Planner(pair) as planner:
        planner._ask = lambda devices, running: (_ for _ in ()).throw(PlannerError("a bug"))
        assert planner.plan_for(without("b:0"), first).plan == expected
        with pytest.raises(PlannerError, match="a bug"):
            planner.plan_for((), first)
        planner._ask = lambda devices, running: Answer(number=1, no_plan="too little memory")
        assert planner.plan_for((), first) is None
        planner._ask = lambda devices, running: Answer(number=1)
        with pytest.raises(SupersededError):  # which is not the same as no plan
            planner.plan_for(CLUSTER.devices, first)


def test_a_question_that_was_superseded_though_it_counts_is_asked_again_at_once(tmp_path):
    told, answers = [], [SupersededError(), SupersededError(), None]

    def plan_for(devices, running):
        if (answer := answers.pop(0)) is not None:
            raise answer

    async def ask() -> None:
        journal = Journal.open(tmp_path / "journal")
        server = Server(Settings(devices=("a:0",)), journal, plan_for, new_token())
        server._machine = SimpleNamespace(
            wants=lambda number: True, planned=lambda number, offer, now_s: told.append(number) or []
        )
        await asyncio.wait_for(server._plan(1, ("a:0",), None), 0.9 * FIRST_RETRY_S)
        journal.close()

    asyncio.run(ask())
    assert (told, answers) == ([1], [])


def test_what_else_the_planners_process_prints_is_left_out():
    answer = Answer(number=3, no_plan="too little memory")
    child = _Child.__new__(_Child)
    answered: Future[Answer] = Future()
    child._process = SimpleNamespace(stdout=io.BytesIO(b"a warning\n" + msgspec.json.encode(answer) + b"\n"))
    child._waiting, child._changed = {3: answered}, threading.Lock()
    child._read()
    assert answered.result(0) == answer
