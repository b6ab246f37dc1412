"""Thousands of members: what each of them says is not weighed against all others each time."""

import pytest

from arachne_runtime.membership.messages import AgentHello, Beat, Exited, Frozen, MemberHello, Ready
from launch.coordinator.actions import AskPlan
from launch.coordinator.history import History
from launch.coordinator.machine import Machine
from launch.coordinator.phase import Phase
from launch.coordinator.settings import Settings
from launch.coordinator.team import Team
from launch.coordinator.worth import Offer

from .coordinator_world import plan_of

DEVICES = tuple(f"n{node}:{index}" for node in range(125) for index in range(8))


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    """Each look at all members."""
    found: list[str] = []
    for name in ("unready", "unreported", "missing", "some_are_done"):
        real = getattr(Team, name).fget
        monkeypatch.setattr(
            Team, name, property(lambda team, name=name, real=real: (found.append(name), real(team))[1])
        )
    return found


def test_a_thousand_members_come_report_and_go_on(looks):
    machine = Machine(Settings(devices=DEVICES), History(), 0.0)
    actions = [
        action
        for number, device in enumerate(DEVICES)
        for action in machine.receive(number, MemberHello(device=device, incarnation=device), 0.0)
    ]
    (ask,) = (action for action in actions if isinstance(action, AskPlan))
    machine.planned(ask.number, Offer(plan=plan_of(DEVICES), samples_per_s=1.0), 0.0)
    for number in range(len(DEVICES)):
        machine.receive(number, Ready(generation=1), 0.0)
    assert machine.history.is_completed
    machine.receive(-1, AgentHello(node="n3"), 0.0)
    for _ in range(1000):
        machine.receive(-1, Beat(), 0.0)
    machine.receive(-1, Exited(device="n3:0", incarnation="n3:0", code=1), 0.0)
    assert machine.phase is Phase.FREEZING
    for number, device in enumerate(DEVICES):
        if device != "n3:0":
            machine.receive(number, Frozen(generation=1, report=None), 0.0)
    assert machine.phase is Phase.PLANNING
    assert len(looks) < 100


def test_a_thousand_members_come_back_after_a_restart(looks):
    before = Machine(Settings(devices=DEVICES), History(), 0.0)
    for number, device in enumerate(DEVICES):
        before.receive(number, MemberHello(device=device, incarnation=device), 0.0)
    before.planned(1, Offer(plan=plan_of(DEVICES), samples_per_s=1.0), 0.0)
    looks.clear()
    machine = Machine(Settings(devices=DEVICES), before.history, 0.0)
    for number, device in enumerate(DEVICES):
        assert machine.phase is Phase.RECOVERING
        machine.receive(number, MemberHello(device=device, incarnation=device, generation=1), 0.0)
    assert machine.phase is Phase.TRAINING
    assert len(looks) < 100
