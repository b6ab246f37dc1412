"""When a process that does not come out of a generation ends itself, and when it must not."""

import time

import pytest

from arachne_runtime.elastic import patience as patience_module
from arachne_runtime.elastic.patience import Patience
from arachne_runtime.membership.messages import ChangeWanted, Freeze

PATIENCE_S = 0.05


@pytest.fixture
def patience(monkeypatch):
    """With ``ended``, which has the words of each end."""
    found = Patience()
    found.ended = []
    monkeypatch.setattr(patience_module, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(patience_module, "_give_up", found.ended.append)
    with found.counting():
        yield found
    found.close()


def ended(patience):
    time.sleep(4 * PATIENCE_S)
    return patience.ended


def freeze(generation):
    return Freeze(generation=generation, why=f"generation {generation} ends")


def test_who_stays_in_a_generation_that_has_ended_is_ended(patience):
    patience.left(1)
    patience.on_stop(freeze(2))
    assert ended(patience) == ["generation 2 ends"]


def test_who_leaves_it_in_time_is_not(patience):
    patience.on_stop(freeze(2))
    patience.left(2)
    assert ended(patience) == []


def test_who_left_before_the_word_came_is_not(patience):
    """A rank that sees its peer die leaves at once; the coordinator's word follows."""
    patience.left(2)
    patience.on_stop(freeze(2))
    assert ended(patience) == []


def test_a_planned_change_ends_nobody(patience):
    patience.on_stop(ChangeWanted(generation=2, why="a joiner"))
    assert ended(patience) == []


def test_who_has_left_the_job_is_not_ended(patience):
    patience.close()
    patience.on_stop(freeze(3))
    assert ended(patience) == []


def test_a_script_that_does_something_else_has_its_time(monkeypatch):
    """It may be writing a file; where it comes back to train, the clock starts."""
    said = []
    monkeypatch.setattr(patience_module, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(patience_module, "_give_up", said.append)
    patience = Patience()
    with patience.counting():
        patience.on_stop(freeze(2))
    time.sleep(4 * PATIENCE_S)
    assert said == []
    with patience.counting():
        time.sleep(4 * PATIENCE_S)
    patience.close()
    assert said == ["generation 2 ends"]
