"""Which errors of a rank end it, and which are those of a peer that is gone."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from arachne_runtime.elastic import survivor as survivor_module
from arachne_runtime.elastic.patience import Patience
from arachne_runtime.elastic.survivor import Survivor
from arachne_runtime.errors import (
    DisagreementError,
    LostStateError,
    ReplanError,
    UnsupportedEnvironmentError,
    UsageError,
)
from arachne_runtime.measure.together import Together
from arachne_runtime.membership.client import RefusedError
from arachne_runtime.membership.messages import Freeze
from arachne_runtime.state.words import Progress, Word, agreed, progress_of
from arachne_runtime.testing import run_ranks

CONNECTION = RuntimeError("[../gloo/transport/tcp/pair.cc:525] Read error: Connection reset by peer\nmore")
OWN = RuntimeError("CUDA out of memory")


def replan_error(*processes, cause=None):
    error = ReplanError("the job keeps its plan: process 2: no memory", processes)
    error.__cause__ = cause
    return error


def answer(error, *, ends, engine=None):
    """What the survivor does: the words it leaves the generation with, or None where it raises."""
    stop = Freeze(generation=3, why="a:1 is dead") if ends else None
    client = SimpleNamespace(stop=stop, wait_stop=lambda timeout_s: stop)
    survivor = Survivor(client, None, None, SimpleNamespace(generation=3), engine=engine)
    try:
        return survivor._lost(error)
    except type(error):
        return None


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        UsageError("give all the same batches"),
        RefusedError("start it anew"),
        LostStateError("nobody has blocks.1"),
        replan_error(),  # processes differ, though each is well
        replan_error(0, cause=OWN),
        replan_error(0, 2, cause=ValueError("parameter groups")),
    ],
    ids=repr,
)
def test_an_error_of_this_rank_or_of_all_is_raised_though_another_died_first(error, ends):
    assert answer(error, ends=ends) is None


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "error", [CONNECTION, replan_error(2), replan_error(0, 2, cause=CONNECTION)], ids=repr
)
def test_a_fault_of_another_is_not(error, ends):
    assert answer(error, ends=ends) == str(error).partition("\n")[0]


def test_what_may_be_one_is_where_the_coordinator_says_so(monkeypatch):
    monkeypatch.setattr(survivor_module, "VERDICT_S", 0.01)
    for error in (OWN, UnsupportedEnvironmentError("another rank could not write its part")):
        assert answer(error, ends=True) == str(error)
        assert answer(error, ends=False) is None


@pytest.mark.parametrize(("num_steps", "text"), [(4, None), (5, str(CONNECTION).partition("\n")[0])])
def test_an_error_in_the_middle_of_the_optimizer_is_no_peers(num_steps, text):
    """Whatever it looks like: a step that is half done cannot be repeated."""
    engine = SimpleNamespace(num_steps=num_steps, open=SimpleNamespace(number=4, is_begun=True))
    assert answer(CONNECTION, ends=True, engine=engine) == text


def told():
    """The error of a rank where the last one fails, and of one where two are not at the same step."""
    rank, together = dist.get_rank(), Together.of_default_group()

    def action():
        if rank == 2:
            raise MemoryError("no room")
        return Word()

    with pytest.raises(ReplanError) as failed:
        agreed(together, action)
    words = [Word(progress=Progress(num_steps=number)) for number in (4, 5)]
    with pytest.raises(ReplanError) as differ:
        progress_of(words)
    return failed.value.processes, repr(failed.value.__cause__), differ.value.processes


def test_a_change_of_plan_says_whose_fault_it_was():
    others = ((2,), "None", ())
    assert run_ranks(3, told) == [others, others, ((2,), "MemoryError('no room')", ())]


@pytest.mark.parametrize(
    ("joins", "meets", "is_raised"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_ranks_that_differ_in_the_first_step_of_a_joiner_go_on_without_it(joins, meets, is_raised):
    client = SimpleNamespace(stop=None)
    survivor = Survivor(client, None, None, SimpleNamespace(generation=3))
    survivor._between.joins, survivor._between.meets_joiners = joins, meets
    error = DisagreementError("the ranks have different samples in this step")
    if is_raised:
        with pytest.raises(DisagreementError):
            survivor._lost(error)
    else:
        assert survivor._lost(error) == str(error)
    survivor._between.stepped()
    with pytest.raises(DisagreementError):
        survivor._lost(error)


def test_an_evaluation_that_raised_an_error_of_its_own_is_over():
    """The others of the next generation would wait for its end."""

    def evaluate_once(batches):
        raise ValueError("a metric of the user")

    engine = SimpleNamespace(num_steps=4, open=None, evaluate_once=evaluate_once)
    entering = SimpleNamespace(generation=3, feeds=None)
    survivor = Survivor(SimpleNamespace(stop=None), None, Patience(), entering, engine=engine)
    with pytest.raises(ValueError, match="a metric"):
        survivor.evaluate(engine, [])
    assert not survivor._between.evaluates
