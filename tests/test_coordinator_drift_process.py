"""Drift through everything: members tell what they compute, the coordinator's process asks its planner's."""

import subprocess
import sys

import msgspec
import pytest

from arachne_runtime.membership.client import AgentClient, MemberClient
from arachne_runtime.membership.decision import Report
from arachne_runtime.membership.messages import ChangeWanted
from launch.coordinator.offers import Offers
from launch.coordinator.planner_words import Question
from launch.elastic.coordinating import Duties

from .coordinator_process import TOKEN
from .test_coordinator_drift import problem


@pytest.fixture
def address(tmp_path):
    duties = Duties(
        plan=problem().first,
        journal=str(tmp_path / "journal"),
        token=TOKEN,
        host="127.0.0.1",
        problem=problem(),
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.elastic.coordinating"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    process.stdin.write(msgspec.json.encode(duties) + b"\n")
    process.stdin.flush()
    yield "127.0.0.1", int(process.stdout.readline())
    process.stdin.close()
    process.wait()
    process.stdout.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_slowed_device_leads_to_a_plan_that_gives_it_less(address, monkeypatch):
    monkeypatch.setattr("arachne_runtime.membership.client.COSTS_S", 0.05)
    first = problem().first
    expected = Offers(problem()).answer(Question(number=1, devices=first.devices)).offer.compute_s
    slow = first.devices[0]
    clients = {device: MemberClient(address, TOKEN, device) for device in first.devices}
    with AgentClient(address, TOKEN, "a"):
        for client in clients.values():
            assert client.wait_record(0, 60).plan == first
            client.ready()
        for step in range(1, 400):
            for device, client in clients.items():
                factor = 3.0 if device == slow else 1.0
                client.progress(step, 1.0, factor * expected[device])
            if (stop := clients[slow].wait_stop(0.05)) is not None:
                break
        assert stop == ChangeWanted(generation=1, why=f"{slow} takes 3 times as long as its profile says")
        for client in clients.values():
            assert client.wait_stop(10) is not None
            client.frozen(Report(applied=9, entered=9))
        other = next(client for device, client in clients.items() if device != slow)
        record = other.wait_record(1, 10)
        assert record.why == stop.why
        after = Offers(problem()).answer(
            Question(number=2, devices=first.devices, running=record.plan, slower={slow: 3.0})
        )
        assert after.offer.running_compute_s.get(slow, 0.0) < 0.6 * 3 * expected[slow]
        for client in clients.values():
            client.close()
