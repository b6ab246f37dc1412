"""Real engines lose a rank anywhere in a step, or get one, and train on as if nothing had been."""

import pytest

from .survivors import Fault, job, plan_of, stage, undisturbed

TWO_PIPELINES = plan_of(
    (3, stage((0, 2), (2, "a:0")), stage((2, 5), (2, "a:1"))),
    (3, stage((0, 3), (2, "a:2")), stage((3, 5), (2, "a:3"))),
)


@pytest.fixture(scope="module")
def wanted():
    return undisturbed()


def check(told, wanted, first=0):
    assert told.losses == pytest.approx({s: v for s, v in wanted.losses.items() if s >= first}, abs=1e-9)
    assert told.evaluation == pytest.approx(wanted.evaluation, abs=1e-9)


def test_a_killed_rank_of_two_pipelines(tmp_path, wanted):
    rest = plan_of((6, stage((0, 2), (2, "a:0")), stage((2, 5), (2, "a:1"))))
    with job(tmp_path, (TWO_PIPELINES, rest), {"a:3": Fault(6, "sums")}) as running:
        fault_s = running.hear("a:3", "fault")
        for device in ("a:0", "a:1"):
            told = running.hear(device, "end")
            check(told, wanted)
            print([round(t - fault_s, 3) for s, t in told.steps if 5 <= s <= 8], told.changes)
        assert running.hear("a:2", "exit") == 75
