"""Processes that cannot reach one another write what they hold; together it is a checkpoint, or none."""

import time

import pytest
import torch
import torch.distributed as dist

from arachne_runtime.errors import UsageError
from arachne_runtime.state.alone import save_alone
from arachne_runtime.state.checkpoint import Snapshot, load
from arachne_runtime.state.keeper import Checkpoints
from arachne_runtime.state.parts import covers
from arachne_runtime.surroundings import lone_plan
from arachne_runtime.testing import run_ranks
from bench.cases import engine_of
from bench.exactness_replans import ReplanCase
from bench.exactness_tensor import BLOCKS

from .test_checkpoints_joined import policy
from .test_replan_processes import MORE, Worlds, copies, members_of

CASE = ReplanCase(plan=MORE, adam=True, scheduled=True)
"""Processes 0 and 2 share the first blocks, 1 has the last ones, 3 has all."""


def saves(folder, alive, timeout_s):
    """Which parts of the state are here, and whether a checkpoint came of it; no group is there any more."""
    worlds = Worlds()
    with worlds.entered(members_of(MORE), 1):
        engine = engine_of(CASE)
        checkpoints, _ = Checkpoints.open(policy(folder), engine, tuple)
        engine.step(CASE.batch(0))
        engine.close()
    assert not dist.is_initialized()
    if worlds.process not in alive:
        return None
    done = checkpoints.save_alone(timeout_s)
    again = checkpoints.save_alone(timeout_s)
    return done, again, checkpoints.steps()


def whole_state(folder):
    """After a load into a lone process: by tensor."""
    lone = engine_of(ReplanCase(plan=lone_plan(BLOCKS), adam=True, scheduled=True))
    load(lone, folder)
    found = {key: value for key, (_, value) in copies(lone).items()}
    rate = lone.optimizer.param_groups[0]["lr"]
    lone.close()
    return found, rate


@pytest.fixture(scope="module")
def trained():
    lone = engine_of(ReplanCase(plan=lone_plan(BLOCKS), adam=True, scheduled=True))
    lone.step(CASE.batch(0))
    found = {key: value for key, (_, value) in copies(lone).items()}
    rate = lone.optimizer.param_groups[0]["lr"]
    lone.close()
    return found, rate


@pytest.mark.parametrize("alive", [(0, 1, 2, 3), (1, 3), (0, 1, 2)])
def test_what_the_living_hold_is_a_checkpoint(tmp_path, trained, alive):
    found = run_ranks(4, saves, tmp_path, alive, 30)
    assert [process for process, each in enumerate(found) if each is not None] == list(alive)
    assert all(each == (True, True, (1,)) for each in found if each is not None)
    assert [path.name for path in tmp_path.glob(".part-*")] == []
    state, rate = whole_state(tmp_path / "step-00000001")
    assert rate == trained[1]
    for key, value in trained[0].items():
        assert torch.allclose(state[key], value, rtol=0, atol=1e-9)


def test_a_part_that_nobody_has_makes_no_checkpoint(tmp_path):
    start = time.monotonic()
    found = run_ranks(4, saves, tmp_path, (0, 1), 0.5)
    assert found == [(False, False, ()), (False, False, ()), None, None]
    assert time.monotonic() - start < 40
    with pytest.raises((UsageError, ValueError)):
        load(engine_of(ReplanCase(plan=lone_plan(BLOCKS))), tmp_path / "step-00000001")


def test_parts_that_overlap_cover_a_whole_or_not():
    whole = ((range(6),), (range(4),))
    top, left = ((range(4),), (range(4),)), ((range(6),), (range(2),))
    corner = ((range(4, 6),), (range(2, 4),))
    assert covers([whole, top], whole)
    assert covers([top, left, corner], whole)
    assert not covers([top, left], whole)
    assert covers([top], ((range(1, 2), range(3, 4)), (range(4),)))
    assert covers([], ((range(0),),))
    assert covers([()], ())
    assert not covers([], ())


def test_one_that_comes_late_is_not_needed(tmp_path, monkeypatch):
    """The others give the folder its name while this process writes into it."""
    lone = engine_of(ReplanCase(plan=lone_plan(BLOCKS)))
    lone.step(CASE.batch(0))
    final = tmp_path / "step-00000001"
    write = Snapshot.write

    def overtaken(snapshot, attempt):
        attempt.rename(final)
        write(snapshot, attempt)

    monkeypatch.setattr(Snapshot, "write", overtaken)
    assert save_alone(lone, final, (), 1, lambda path: None)
    monkeypatch.setattr(Snapshot, "write", lambda snapshot, attempt: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_alone(lone, tmp_path / "step-00000002", (), 1, lambda path: None)
    lone.close()
