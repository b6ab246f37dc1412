"""Real engines lose a rank anywhere in a step, or get one, and train on as if nothing had been."""

import signal

import pytest

from bench.recovery_job import EVALUATED, STEPS, Fault, job, plan_of, stage, undisturbed

FAULT = 6
TWO_PIPELINES = plan_of(
    (3, stage((0, 2), (2, "a:0")), stage((2, 5), (2, "a:1"))),
    (3, stage((0, 3), (2, "a:2")), stage((3, 5), (2, "a:3"))),
)
TENSORS = plan_of((2, stage((0, 5), (4, "a:0", "a:1"), (2, "a:2", "a:3"))))
WIDE = plan_of((2, stage((0, 5), (1, "a:0"), (2, "a:1"), (3, "a:2"))))


@pytest.fixture(scope="module")
def wanted():
    return undisturbed()


def check(told, wanted, first=0):
    """Every step from the first on, once, with the loss of one process; the parameters at the end."""
    assert [step for step, _ in told.steps] == list(range(first, STEPS))
    assert told.losses == pytest.approx({s: v for s, v in wanted.losses.items() if s >= first}, abs=1e-9)
    assert told.evaluation == pytest.approx(wanted.evaluation, abs=1e-9)


@pytest.mark.parametrize(
    ("plan", "victim", "where", "rest"),
    [
        (
            TWO_PIPELINES, "a:3", "sums",
            plan_of((6, stage((0, 2), (2, "a:0")), stage((2, 5), (2, "a:1")))),
        ),
        (
            TWO_PIPELINES, "a:1", "message",
            plan_of((6, stage((0, 1), (2, "a:3")), stage((1, 3), (2, "a:0")), stage((3, 5), (2, "a:2")))),
        ),
        (
            TENSORS, "a:0", "exchange",
            plan_of((2, stage((0, 3), (6, "a:2", "a:3")), stage((3, 5), (6, "a:1")))),
        ),
        (WIDE, "a:2", "word", plan_of((3, stage((0, 5), (3, "a:0"), (1, "a:1"))))),
        (WIDE, "a:1", "update", plan_of((2, stage((0, 5), (3, "a:2"), (3, "a:0"))))),
        (WIDE, "a:0", "applied", plan_of((4, stage((0, 2), (3, "a:1")), stage((2, 5), (3, "a:2"))))),
    ],
)  # fmt: skip
def test_a_rank_is_killed(tmp_path, wanted, plan, victim, where, rest):
    with job(tmp_path, (plan, rest), {victim: Fault(FAULT, where)}) as running:
        killed_s = running.hear(victim, "fault")
        for device in rest.devices:
            told = running.hear(device, "end")
            check(told, wanted)
            again_s = dict(told.steps)[FAULT + (where == "applied")] - killed_s
            print(f"{device}: next step {again_s:.3f} s after the kill; changes {told.changes}")
        for device in set(plan.devices) - set(rest.devices) - {victim}:
            assert running.hear(device, "exit") == 75


@pytest.mark.parametrize("where", ["carrying", "ready"])
def test_another_dies_while_the_next_generation_forms(tmp_path, wanted, where):
    two = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (4, "a:1"))))
    alone = plan_of((3, stage((0, 5), (4, "a:0"))))
    faults = {"a:2": Fault(FAULT, "sums"), "a:1": Fault(FAULT, where)}
    with job(tmp_path, (WIDE, two, alone), faults) as running:
        running.hear("a:1", "fault")
        told = running.hear("a:0", "end")
        check(told, wanted)
        print(told.changes)


def test_a_rank_that_stands_still_ends_by_itself(tmp_path, wanted):
    """As one in a send that gloo leaves half written: its device is free for a fresh process."""
    alone = plan_of((3, stage((0, 5), (4, "a:0"))))
    faults = {"a:2": Fault(FAULT, "sums"), "a:1": Fault(FAULT, "sums", hangs=True)}
    with job(tmp_path, (WIDE, alone), faults) as running:
        assert running.hear("a:1", "exit") == 75
        check(running.hear("a:0", "end"), wanted)


def test_who_has_left_a_generation_in_time_is_not_ended_by_its_patience(tmp_path, wanted):
    """They see the connection break, and leave, before the coordinator says that the generation ends."""
    two = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (4, "a:1"))))
    faults = {device: Fault(patience_s=1.0) for device in two.devices} | {"a:2": Fault(FAULT, "sums")}
    with job(tmp_path, (WIDE, two), faults, pace_s=0.2) as running:
        for device in two.devices:
            check(running.hear(device, "end"), wanted)


def test_who_cannot_take_its_part_of_the_next_plan_ends_alone(tmp_path, wanted):
    two = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (4, "a:1"))))
    alone = plan_of((3, stage((0, 5), (4, "a:0"))))
    faults = {"a:2": Fault(FAULT, "sums"), "a:1": Fault(FAULT, "settling", raises=True)}
    with job(tmp_path, (WIDE, two, alone), faults) as running:
        assert "a fault of this process alone" in running.hear("a:1", "error")
        check(running.hear("a:0", "end"), wanted)


@pytest.mark.parametrize("where", ["batch", "tally"])
def test_an_evaluation_is_repeated(tmp_path, wanted, where):
    """One rank dies in its second batch, or as the losses of all are added."""
    two = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (4, "a:1"))))
    with job(tmp_path, (WIDE, two), {"a:2": Fault(EVALUATED, where)}) as running:
        running.hear("a:2", "fault")
        for device in two.devices:
            told = running.hear(device, "end")
            check(told, wanted)
            assert told.between == pytest.approx(wanted.between, abs=1e-9)


def test_a_stopped_rank_is_left_behind(tmp_path, wanted):
    rest = plan_of((3, stage((0, 5), (2, "a:2"))), (3, stage((0, 4), (2, "a:0")), stage((4, 5), (2, "a:3"))))
    fault = Fault(FAULT, "message", signal.SIGSTOP)
    with job(tmp_path, (TWO_PIPELINES, rest), {"a:1": fault}) as running:
        running.hear("a:1", "fault")
        running.agent.stopped(running.members["a:1"])
        for device in rest.devices:
            check(running.hear(device, "end"), wanted)


def test_a_process_joins(tmp_path, wanted):
    two = plan_of((3, stage((0, 3), (4, "a:0")), stage((3, 5), (4, "a:1"))))
    three = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (3, "a:2"), (1, "a:1"))))
    with job(tmp_path, (two, three), {"a:0": Fault(joined_at=FAULT)}) as running:
        running.hear("a:0", "waits")
        running.start("a:2")
        joined = running.hear("a:2", "end")
        for device in ("a:0", "a:1"):
            told = running.hear(device, "end")
            check(told, wanted)
            ((step, moved, pause_s),) = told.changes
            print(f"{device}: joined at step {step}, {moved} bytes moved, pause {pause_s:.3f} s")
    first = min(joined.losses)
    assert 0 < first < STEPS - 1
    check(joined, wanted, first)


def test_one_that_joined_between_evaluations_outlives_another(tmp_path, wanted):
    """Its script has made fewer calls of session.batches than those of the others."""
    two = plan_of((3, stage((0, 3), (4, "a:0")), stage((3, 5), (4, "a:1"))))
    three = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (3, "a:2"), (1, "a:1"))))
    rest = plan_of((3, stage((0, 2), (4, "a:2")), stage((2, 5), (4, "a:0"))))
    faults = {"a:0": Fault(joined_at=FAULT), "a:1": Fault(EVALUATED + 3, "sums")}
    with job(tmp_path, (two, three, rest), faults) as running:
        running.hear("a:0", "waits")
        running.start("a:2")
        told, joined = running.hear("a:0", "end"), running.hear("a:2", "end")
    check(told, wanted)
    assert told.between == pytest.approx(wanted.between, abs=1e-9)
    check(joined, wanted, min(joined.losses))
    assert joined.between == pytest.approx(wanted.between[1:], abs=1e-9)


def test_the_last_holder_of_a_block_dies(tmp_path, wanted):
    """The other rank has its copy of step 4, and does steps 4 and 5 again."""
    chain = plan_of((3, stage((0, 3), (4, "a:0")), stage((3, 5), (4, "a:1"))))
    rest = plan_of((3, stage((0, 5), (4, "a:0"))))
    with job(tmp_path, (chain, rest), {"a:1": Fault(FAULT, "message")}, pace_s=0.05) as running:
        told = running.hear("a:0", "end")
    check(told, wanted)
    ((step, _, _),) = told.changes
    assert step == 4


def test_without_memory_for_snapshots_the_error_says_what_is_lost(tmp_path):
    chain = plan_of((3, stage((0, 3), (4, "a:0")), stage((3, 5), (4, "a:1"))))
    rest = plan_of((3, stage((0, 5), (4, "a:0"))))
    with job(tmp_path, (chain, rest), {"a:1": Fault(FAULT, "message", has_memory=False)}) as running:
        said = running.hear("a:0", "error")
        assert running.hear("a:0", "exit") == 1
    assert "the last process that held blocks.3." in said
    assert "checkpoint" in said


def test_a_joiner_with_batches_of_its_own_ends_alone(tmp_path):
    """It begins with the first one, where the others are at another."""
    two = plan_of((3, stage((0, 3), (4, "a:0")), stage((3, 5), (4, "a:1"))))
    three = plan_of((3, stage((0, 2), (4, "a:0")), stage((2, 5), (3, "a:2"), (1, "a:1"))))
    own = Fault(own_batches=True)
    with job(tmp_path, (two, three), {"a:0": own._replace(joined_at=FAULT), "a:1": own}) as running:
        running.hear("a:0", "waits")
        running.start("a:2", own)
        assert "different samples" in running.hear("a:2", "error")
        wanted = undisturbed(own_batches=True)
        for device in two.devices:
            check(running.hear(device, "end"), wanted)
