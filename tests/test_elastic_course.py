"""What follows when processes of an elastic job end, without any process."""

import time

import msgspec
import pytest

from arachne_runtime.errors import NoFeasiblePlanError, UnsupportedEnvironmentError, UsageError
from arachne_runtime.membership.decision import Decision, Verdict
from arachne_runtime.membership.messages import Completed, Ended, Member, Published, Record
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch.coordinator.journal import Journal
from launch.elastic import job_file
from launch.elastic.afresh import LIVED_S
from launch.elastic.course import MOST_ALIKE, Course
from launch.elastic.ledger import Ledger
from launch.elastic.words import Again, Dismiss, Gone
from launch.failure import Failure, NodeLostError, RanksFailedError

DEVICES = ("a:0", "a:1", "b:0")


def plan_of(*devices: str) -> Plan:
    stages = [Stage(layers=(0, 1), replicas=(Replica(devices=(device,), share=1),)) for device in devices]
    pipelines = tuple(Pipeline(micro_batches=1, micro_batch=1, stages=(stage,)) for stage in stages)
    return Plan(model="tiny", global_batch=len(devices), sequence=1, pipelines=pipelines)


class Job:
    """A course, the journal that it reads, and what it said."""

    def __init__(self, folder) -> None:
        self.journal = Journal.open(folder / "journal")
        self.said: list[str] = []
        self.course = Course(DEVICES, Ledger(folder / "journal"), self.said.append)
        self.generation = 0

    def trains(self, step: int | None = None, **incarnations: str) -> None:
        """A generation of these, by device, is completed, and redoes a step."""
        self.generation += 1
        named = {f"{name[0]}:{name[1]}": incarnation for name, incarnation in incarnations.items()}
        members = tuple(Member(device=device, incarnation=i) for device, i in named.items())
        decision = Decision(verdict=Verdict.REDO, step=step) if step is not None else None
        record = Record(
            generation=self.generation,
            members=members,
            plan=plan_of(*named),
            decision=decision,
            why="a test",
        )
        self.journal.append(Published(record=record))
        self.journal.append(Completed(generation=self.generation))

    def gone(self, device: str, code: int = -9, incarnation: str | None = None, **words):
        failure = Failure(rank=0, where=f"device {device}", code=code, time_s=0.0, **words)
        word = Gone(device=device, incarnation=incarnation, code=code, failure=failure)
        return self.course.gone(word if code not in (0, 75) else msgspec.structs.replace(word, failure=None))


@pytest.fixture
def found(tmp_path):
    job = Job(tmp_path)
    yield job
    job.journal.close()


USERS = {"code": 1, "recorded": True, "kind": "ValueError", "text": "no such file"}


def test_a_process_that_trained_gets_a_fresh_one_soon_and_later_each_time_it_fails(found):
    found.trains(a0="1", a1="2", b0="3")
    assert found.gone("a:0", incarnation="1") == [Again(device="a:0", after_s=1)]
    assert [found.gone("a:0", -6)[0].after_s, found.gone("a:0", 3)[0].after_s] == [2, 4]
    found.trains(a0="4", a1="2", b0="3")
    assert found.gone("a:0", incarnation="4")[0].after_s == 8  # it trained, but failed soon
    found.trains(a0="5", a1="2", b0="3")
    found.course._afresh.clock = lambda: time.monotonic() + 60 + LIVED_S
    assert found.gone("a:0", incarnation="5")[0].after_s == 1


def test_one_that_was_left_out_is_replaced_at_once_but_not_for_ever(found):
    found.trains(a0="1", a1="2", b0="3")
    assert found.gone("a:0", 75, "1") == [Again(device="a:0", after_s=0)]
    assert [found.gone("a:0", 75, str(n))[0].after_s for n in range(4, 8)] == [1, 2, 4, 8]
    found.trains(a0="8", a1="2", b0="3")
    assert found.gone("a:0", 75, "8") == [Again(device="a:0", after_s=16)]  # its script may say so itself


def test_three_failures_alike_before_it_trained_are_enough(found):
    found.trains(a0="1", a1="2", b0="3")
    assert [bool(found.gone("a:0", code)) for code in (-11, -6, -11, -11, -11)] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert "a:0 is given up" in found.said[-1]
    assert "killed by signal 11 (SIGSEGV)" in found.said[-1]
    assert found.course.error is None


def test_a_users_error_before_anything_trained_ends_the_job_with_it(found):
    assert found.gone("a:0", 1, recorded=True, kind="RuntimeError", lost_peer=True)
    assert found.gone("a:1", **USERS) == []
    assert found.course.is_over
    assert isinstance(found.course.error, RanksFailedError)
    assert "ValueError: no such file" in str(found.course.error)


def test_a_users_error_on_one_rank_of_a_training_job_does_not(found):
    found.trains(a0="1", a1="2", b0="3")
    assert found.gone("a:1", incarnation="2", **USERS) == [Again(device="a:1", after_s=1)]
    assert found.gone("a:0", incarnation="1", **USERS)
    assert not found.gone("b:0", incarnation="3", **USERS)  # the last one: the state is gone as well
    assert "ValueError" in str(found.course.error)


def test_an_error_that_mentions_a_connection_ends_a_job_that_never_trained(found):
    lost = {"code": 1, "recorded": True, "kind": "ConnectionError", "lost_peer": True}
    for port in (40001, 40002):
        assert found.gone("a:0", **lost, text=f"data server: connection refused [{port}]")
    assert not found.gone("a:0", **lost, text="data server: connection refused [40003]")
    assert "data server" in str(found.course.error)
    assert found.course.is_over


def test_one_that_only_lost_a_peer_while_others_train_is_started_again(found):
    found.trains(a0="1", a1="2", b0="3")
    lost = {"code": 1, "recorded": True, "kind": "RuntimeError", "lost_peer": True}
    assert all(found.gone("a:0", **lost, text="connection reset by peer") for _ in range(5))


def test_an_error_that_goes_from_rank_to_rank_in_one_step_ends_the_job(found):
    found.trains(a0="1", a1="2", b0="3")
    for number in range(MOST_ALIKE - 1):
        device = DEVICES[number % 3]
        found.trains(step=7, a0=f"a:0 {number}", a1=f"a:1 {number}", b0=f"b:0 {number}")
        assert found.gone(device, incarnation=f"{device} {number}", **USERS)
        assert found.gone(
            device, incarnation=f"{device} {number}", **USERS
        )  # of two in one generation one counts
    found.trains(step=7, a0="x", a1="y", b0="z")
    assert not found.gone("b:0", incarnation="z", **USERS)
    assert "ValueError: no such file" in str(found.course.error)


def test_the_same_error_in_later_steps_does_not(found):
    for number in range(2 * MOST_ALIKE):
        found.trains(step=number + 1, a0=f"a:0 {number}", a1=f"a:1 {number}", b0=f"b:0 {number}")
        assert found.gone("a:0", incarnation=f"a:0 {number}", **USERS)


@pytest.mark.parametrize("kind", ["LostStateError", "CoordinatorLostError"])
def test_lost_state_is_no_error_of_the_script_and_fresh_processes_go_on_from_a_checkpoint(found, kind):
    found.trains(a0="1", a1="2")
    lost = {"code": 1, "recorded": True, "kind": kind, "text": "the last process that held blocks.0 is gone"}
    found.gone("b:0", incarnation="3")
    assert found.gone("a:0", incarnation="1", **lost) == [Again(device="a:0", after_s=1)]
    assert found.gone("a:1", incarnation="2", **lost) == [Again(device="a:1", after_s=1)]
    assert found.course.error is None


def test_the_end_of_the_script_dismisses_who_waits(found):
    found.trains(a0="1", a1="2")
    assert found.gone("a:0", 0, "1") == [Dismiss(device="b:0")]
    assert not found.course.is_over
    assert found.gone("b:0") == []
    assert found.gone("a:1", 0, "2") == []
    assert (found.course.is_over, found.course.error) == (True, None)


def test_who_waited_when_the_script_was_done_is_no_failure(found):
    found.trains(a0="1", a1="2")
    assert found.gone("b:0", 1, recorded=True, kind="JobDoneError", text="the script is done") == []
    found.gone("a:0", 0, "1")
    found.gone("a:1", 0, "2")
    assert (found.course.is_over, found.course.error) == (True, None)


def test_a_failure_behind_the_end_of_the_script_is_told(found):
    found.trains(a0="1", a1="2", b0="3")
    found.gone("a:0", 0, "1")
    found.gone("a:1", incarnation="2", **USERS)
    assert not found.course.is_over
    found.gone("b:0", 0, "3")
    assert found.course.is_over
    assert "ValueError" in str(found.course.error)


def test_a_script_without_a_session_has_no_one_to_dismiss(found):
    assert [found.gone(device, 0) for device in DEVICES] == [[], [], []]
    assert (found.course.is_over, found.course.error) == (True, None)


def test_the_coordinators_word_ends_the_job_once_all_have_saved(found):
    found.trains(a0="1", a1="2", b0="3")
    ended = {"code": 1, "recorded": True, "kind": "JobEndedError", "text": "no plan fits, and no device came"}
    found.gone("a:0", incarnation="1", **ended)
    assert isinstance(found.course.error, NoFeasiblePlanError)
    assert not found.course.is_over
    found.gone("a:1", incarnation="2", **ended)
    found.course.lost(["b:0"])
    assert found.course.is_over


def ends(found, why: str, **words) -> None:
    """The coordinator writes so."""
    found.journal.append(Ended(why=why, **words))


def test_the_coordinators_end_is_heard_where_no_process_is_left_to_tell_it(found):
    found.trains(a0="1", a1="2", b0="3")
    found.course.lost(DEVICES)
    found.course.ended()
    assert found.course.error is None
    ends(found, "no plan fits, and nothing changed in 600 s")
    found.course.ended()
    assert isinstance(found.course.error, NoFeasiblePlanError)
    assert found.course.is_over


def test_the_end_of_the_script_is_heard_where_a_node_cannot_tell_it(found):
    found.trains(a0="1", a1="2", b0="3")
    ends(found, "the script is done", is_done=True)
    found.course.lost(DEVICES)
    found.course.ended()
    assert (found.course.is_ending, found.course.is_over, found.course.error) == (True, True, None)


def test_a_script_that_says_nothing_of_the_jobs_end_does_not_hide_it(found):
    found.trains(a0="1", a1="2", b0="3")
    ends(found, "no plan fits, and nothing changed in 600 s")
    for device, incarnation in (("a:0", "1"), ("a:1", "2"), ("b:0", "3")):
        found.gone(device, 0, incarnation)
    assert isinstance(found.course.error, NoFeasiblePlanError)


def test_a_failure_behind_the_end_is_told_though_a_node_is_lost_last(found):
    found.trains(a0="1", a1="2", b0="3")
    found.gone("a:0", 0, "1")
    found.gone("a:1", incarnation="2", **USERS)
    found.course.lost(["b:0"])
    assert found.course.is_over
    assert "ValueError" in str(found.course.error)


@pytest.mark.parametrize("is_done", [True, False])
def test_a_node_that_is_lost_while_others_end_had_ended_or_had_not(found, is_done):
    found.trains(a0="1", a1="2", b0="3")
    found.gone("a:0", 0, "1")
    found.gone("a:1", 0, "2")
    if is_done:
        ends(found, "the script is done", is_done=True)
    found.course.lost(["b:0"])
    assert found.course.is_over
    assert is_done or isinstance(found.course.error, NodeLostError)
    assert (found.course.error is None) == is_done


def test_a_job_is_found_by_its_file_and_a_dead_one_is_swept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(UnsupportedEnvironmentError, match="no elastic job of this user runs"):
        job_file.find_job(None)
    with job_file.job_folder("gpt/2 x") as one, job_file.job_folder("gpt") as two:
        for folder in (one, two):
            job_file.write_secret(folder / "token", b"secret")
            job_file.write_job_file(folder, ("127.0.0.1", 1), folder / "token", folder / "journal")
        assert (tmp_path / "arachne").stat().st_mode & 0o777 == 0o700
        assert all(p.stat().st_mode & 0o777 == 0o600 for p in (tmp_path / "arachne").glob("*.json"))
        assert job_file.find_job(one.name).token == "secret"
        with pytest.raises(UsageError, match="2 elastic jobs run here"):
            job_file.find_job(None)
        dead = msgspec.structs.replace(job_file.find_job(two.name), started=1)
        (two.parent / f"{two.name}.json").write_bytes(msgspec.json.encode(dead))
        assert job_file.find_job(None).name == one.name
        assert not two.exists()
        path = one.with_name(f"{one.name}.json")
        elsewhere = msgspec.structs.replace(dead, name=one.name, place="another container")
        path.write_bytes(msgspec.json.encode(elsewhere))
        with pytest.raises(UnsupportedEnvironmentError, match="no elastic job"):
            job_file.find_job(None)
        assert (path.exists(), one.exists()) == (True, True)  # nobody here knows whether it runs
    assert not list((tmp_path / "arachne").iterdir())


def test_a_folder_that_others_may_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "arachne").mkdir(mode=0o755)
    with pytest.raises(UnsupportedEnvironmentError, match="not a folder of this user's alone"):
        job_file.jobs_folder()
