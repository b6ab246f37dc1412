"""How a process leaves an elastic job: what it saves, and with which code."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from arachne_runtime.elastic import joining
from arachne_runtime.elastic.survivor import FAILURES, FAILURES_OF_JOINERS, Survivor
from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.membership.client import (
    CoordinatorLostError,
    JobDoneError,
    JobEndedError,
    LeftOutError,
)


class Leaving:
    """A process in the middle of step 4, and what it did in turn."""

    def __init__(self, saves=True) -> None:
        self.done = []
        patience = SimpleNamespace(close=lambda: self.done.append("patience"))
        start = SimpleNamespace(number=4, give_back=lambda: self.done.append("back"))
        engine = SimpleNamespace(num_steps=4)
        self.survivor = Survivor(None, None, patience, None, engine=engine, _start=start)
        self.checkpoints = SimpleNamespace(save_alone=self.save)
        self.saves = saves

    def save(self) -> bool:
        self.done.append("save")
        if isinstance(self.saves, Exception):
            raise self.saves
        return self.saves


@pytest.mark.parametrize("error", [JobEndedError("no plan fits"), CoordinatorLostError("no word")], ids=repr)
@pytest.mark.parametrize(
    ("saves", "words"),
    [(True, "its newest checkpoint"), (False, "do not hold all"), (OSError("full"), "OSError: full")],
)
def test_a_job_that_cannot_go_on_saves_what_it_has(error, saves, words, capsys):
    leaving = Leaving(saves)
    joining.end(error, leaving.survivor, leaving.checkpoints)
    assert leaving.done == ["patience", "back", "save"]
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(JobDoneError("the script is done"), 0), (LeftOutError("without a:1"), 75), (UsageError("mine"), None)],
    ids=repr,
)
def test_others_save_nothing(error, code):
    leaving = Leaving()
    if code is None:
        joining.end(error, leaving.survivor, leaving.checkpoints)
    else:
        with pytest.raises(SystemExit) as ended:
            joining.end(error, leaving.survivor, leaving.checkpoints)
        assert ended.value.code == code
    assert leaving.done == []


def test_a_job_that_ends_as_its_script_does_saves_too():
    leaving = Leaving()
    error = JobEndedError("no plan fits")
    survivor = MagicMock(finish=MagicMock(side_effect=error))
    with pytest.raises(JobEndedError):
        joining.finish(survivor, leaving.checkpoints)
    assert leaving.done == ["save"]


def test_without_checkpoints_there_is_nothing_to_save():
    joining.end(JobEndedError("no plan fits"), Leaving().survivor, None)


def leave(survivor, times):
    for _ in range(times):
        survivor._leave("cannot connect to b")


def test_generations_that_fail_alike_end_the_job_with_what_they_say():
    engine = MagicMock(num_steps=4, open=None)
    survivor = Survivor(MagicMock(), MagicMock(), MagicMock(), MagicMock(), engine=engine)
    leave(survivor, FAILURES - 1)
    assert survivor._repeated(lambda: "done", engine, 4) == "done"
    leave(survivor, FAILURES - 1)
    survivor._leave("")  # a planned change is no failure
    with pytest.raises(JobEndedError, match=r"20 generations in a row .* the last: cannot connect to b"):
        leave(survivor, 1)


def test_who_holds_no_state_ends_sooner_and_alone():
    survivor = Survivor(MagicMock(), MagicMock(), MagicMock(), MagicMock())
    leave(survivor, FAILURES_OF_JOINERS - 1)
    with pytest.raises(UnsupportedEnvironmentError, match="cannot connect to b"):
        leave(survivor, 1)
