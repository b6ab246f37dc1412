"""Who asks for another plan, and what becomes of it: wishes of several ranks, files, callbacks that fail."""

import warnings

import pytest
import torch

import arachne_runtime as arachne
from arachne_runtime.errors import UsageError
from arachne_runtime.plan.files import write
from arachne_runtime.testing import run_ranks

from .test_replan import CHAIN, TURNED, WIDE, Numbered, tiny


def squared(output, batch):
    return output.square().mean()


def called(plan) -> str:
    return next(
        name for other, name in ((CHAIN, "chain"), (WIDE, "wide"), (TURNED, "turned")) if other == plan
    )


def changes_of_a_loop(watch, each_step=lambda session, engine: None):
    """Which plans a loop took, and at which steps."""
    heard = []
    with warnings.catch_warnings(), arachne.Session(CHAIN, device="cpu") as session:
        warnings.simplefilter("error")
        engine = session.engine(tiny, optimizer=torch.optim.SGD, loss=squared, dtype=torch.float64)
        watch(session, engine)
        session.on_replan(lambda change: heard.append((change.step, called(change.new))))
        for batch in session.batches(Numbered(), 12, seed=4, epochs=2):
            engine.step(batch)
            each_step(session, engine)
    return heard


def both_wish():
    def watch(session, engine):
        wishes = [WIDE] if session.rank == 0 else [TURNED]
        session.watch_plan(lambda: wishes.pop() if wishes and engine.num_steps == 1 else None)

    return changes_of_a_loop(watch)


def test_of_two_wishes_in_one_step_the_second_is_taken_next():
    for heard in run_ranks(2, both_wish):
        assert heard == [(2, "wide"), (3, "turned")]


def the_same_wish_twice():
    """Rank 1 sees the same file a step later: there is nothing to change."""

    def watch(session, engine):
        due = 1 + session.rank
        wishes = [WIDE]
        session.watch_plan(lambda: wishes.pop() if wishes and engine.num_steps == due else None)

    return changes_of_a_loop(watch)


def test_a_plan_that_the_job_has_already_is_no_change():
    for heard in run_ranks(2, the_same_wish_twice):
        assert heard == [(2, "wide")]


def file_again(path):
    def each_step(session, engine):
        if session.rank == 0 and engine.num_steps in (1, 5):
            path.unlink()
            write(WIDE, path)
        if engine.num_steps == 4:
            session.replan(CHAIN)

    def watch(session, engine):
        if session.rank == 0:
            session.watch_plan(path)

    return changes_of_a_loop(watch, each_step)


def test_a_file_that_asks_again_for_a_plan_that_was_left_is_followed(tmp_path):
    write(CHAIN, tmp_path / "plan.json")
    for heard in run_ranks(2, file_again, tmp_path / "plan.json"):
        assert heard == [(2, "wide"), (4, "chain"), (6, "wide")]


def callback_fails():
    def fail(change):
        raise UsageError("the callback's own fault")

    def watch(session, engine):
        wishes = [WIDE]
        session.watch_plan(lambda: wishes.pop() if wishes else None)
        session.on_replan(fail)

    with pytest.raises(UsageError, match="the callback's own fault"):
        changes_of_a_loop(watch)


def test_the_error_of_a_callback_is_not_told_as_a_plan_that_stays():
    run_ranks(2, callback_fails)
