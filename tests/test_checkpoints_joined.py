"""Checkpoints of a job whose processes come and go."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.state import keeper
from arachne_runtime.state.checkpoint import Snapshot, load
from arachne_runtime.state.keeper import Checkpoints, Policy
from arachne_runtime.state.old import Old
from arachne_runtime.state.replan import replan
from arachne_runtime.surroundings import lone_plan
from arachne_runtime.testing import run_ranks
from bench.cases import engine_of
from bench.exactness_replans import ReplanCase

from .test_replan import BLOCKS, plan_of, stage
from .test_replan_processes import Worlds, copies, make, node

ALONE = plan_of((6, stage((0, BLOCKS), (2, "a:0"))))
BOTH = plan_of((6, stage((0, BLOCKS), (1, "a:0"), (1, "b:0"))))
CASE = ReplanCase(plan=ALONE, next_plans=(BOTH,), adam=True)


def policy(folder, **given):
    settings = {"every": 1, "keep": 3, "background": False, "timeout_s": 60}
    return Policy(folder=folder, **settings | given)


def save_together(folder, background, others):
    """The first trains and saves alone; another joins, and they save together."""
    worlds, engine, old = Worlds(), None, None
    if worlds.process == 0:
        with worlds.entered([0], 1):
            engine = engine_of(CASE)
            checkpoints, _ = Checkpoints.open(policy(folder, background=background), engine, tuple)
            engine.after_step.append(checkpoints.after_step)
            engine.step(CASE.batch(0))
            old = Old.of(engine)
            engine.close()
    with worlds.entered([0, 1], 2) as together:
        engine = replan(old, make(CASE, BOTH), together, node([0, 1])).commit(engine)
        if worlds.process == 1:
            mine = policy(folder, background=background, **others)
            checkpoints = Checkpoints.join(mine, engine, tuple)
            assert checkpoints.resumed_from == 1
            engine.after_step.append(checkpoints.after_step)
        try:
            engine.step(CASE.batch(1))
            checkpoints.wait()
            engine.step(CASE.batch(2))
            checkpoints.close(failed=False)
        finally:
            engine.close()
    return copies(engine)


@pytest.mark.parametrize("background", [False, True])
def test_one_that_joins_saves_with_the_others(tmp_path, background):
    held, _ = run_ranks(2, save_together, tmp_path, background, {})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{n:08d}" for n in (1, 2, 3)]
    lone = engine_of(ReplanCase(plan=lone_plan(BLOCKS), adam=True))
    load(lone, tmp_path / "step-00000003")
    for key, (tensor, _) in copies(lone).items():
        assert torch.equal(tensor, held[key][0])
    lone.close()


def refused(folder):
    with pytest.raises((UsageError, UnsupportedEnvironmentError)) as caught:
        save_together(folder, False, {"keep": 2})
    return str(caught.value)


def test_one_that_joins_with_other_arguments_is_refused_on_all(tmp_path):
    _, joiner = run_ranks(2, refused, tmp_path)
    assert "with other arguments" in joiner


def goes_on_without(folder):
    """A process goes while a checkpoint is written; the first one would wait for its file for a minute."""
    worlds, start = Worlds(), time.monotonic()
    write = Snapshot.write
    with worlds.entered([0, 1], 1):
        engine = engine_of(ReplanCase(plan=BOTH, adam=True))
        checkpoints, _ = Checkpoints.open(policy(folder, background=True), engine, tuple)
        if worlds.process == 1:
            Snapshot.write = lambda self, attempt: None
        engine.after_step.append(checkpoints.after_step)
        engine.step(CASE.batch(0))
        old = Old.of(engine)
        engine.close()
    Snapshot.write = write
    if worlds.process == 1:
        checkpoints.close(failed=True)
        return None
    with worlds.entered([0], 2) as together:
        engine = replan(old, make(CASE, ALONE), together, node([0])).commit(engine)
        engine.step(CASE.batch(1))
        checkpoints.close(failed=False)
        engine.close()
    return checkpoints.steps(), time.monotonic() - start


def test_a_checkpoint_that_lost_a_writer_is_given_up(tmp_path):
    (steps, seconds), _ = run_ranks(2, goes_on_without, tmp_path)
    assert steps == (2,)
    assert seconds < 30


def test_a_job_that_failed_does_not_wait_for_a_slow_disk(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(keeper, "CLOSE_S", 0.1)
    monkeypatch.setattr(Snapshot, "write", lambda self, attempt: released.wait(20))
    engine = engine_of(ReplanCase(plan=lone_plan(BLOCKS)))
    checkpoints, _ = Checkpoints.open(policy(tmp_path, background=True), engine, tuple)
    engine.after_step.append(checkpoints.after_step)
    engine.step(CASE.batch(0))
    start = time.monotonic()
    checkpoints.close(failed=True)
    assert time.monotonic() - start < 10
    released.set()
    engine.close()


def test_the_end_of_a_save_is_not_awaited_where_a_generation_ends(tmp_path):
    """The files of the others may never come, and a thread that waits holds the next generation up."""
    engine = SimpleNamespace(survival=SimpleNamespace(has_ended=False))
    checkpoints, start = Checkpoints(policy(tmp_path, background=True), engine, tuple), time.monotonic()
    writing = checkpoints._writing = keeper._Writing(tmp_path / "part", tmp_path / "whole", ())
    writing.thread = threading.Thread(target=writing.stop.wait, args=(60,))
    writing.thread.start()
    ends = threading.Timer(0.2, lambda: setattr(engine.survival, "has_ended", True))
    ends.start()
    checkpoints.wait()
    assert time.monotonic() - start < 30
    assert not writing.thread.is_alive()
    ends.join()
