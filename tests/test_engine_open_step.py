"""A step in three parts: what a rank can still do with one whose commit word never came back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from arachne_runtime.elastic.standing import is_half_done
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import DisagreementError, LostStateError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

PLAN = Plan(
    model="tiny",
    global_batch=4,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=2,
            micro_batch=2,
            stages=(
                Stage(layers=(0, 1), replicas=tuple(Replica(devices=(f"a:{i}",), share=1) for i in range(2))),
                Stage(layers=(1, 2), replicas=(Replica(devices=("a:2",), share=2),)),
            ),
        ),
    ),
)
STEPS = 5


class Alone:
    """Takes steps over, and does nothing more."""

    generation = 7

    def step(self, engine, batch):
        return engine.step_once(batch)


def engine_of(optimizer=lambda p: torch.optim.AdamW(p, lr=0.1)):
    parts = ModelParts.of(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
    recipe = Recipe(optimizer=optimizer, loss=lambda y, x: y.square().mean(), clip_norm=0.5)
    return Engine(PLAN, parts, recipe)


def batch_of(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def undisturbed():
    engine = engine_of()
    losses = [engine.step(batch_of(step)).loss for step in range(STEPS)]
    engine.close()
    return losses


def cut_short(ending):
    """Losses where the word of step 2 is lost on every rank, and each ends the step by itself."""
    engine, told = engine_of(), []
    engine.survival = Alone()
    engine.on_applied.append(lambda report, batch: told.append(report.step))
    losses = [engine.step(batch_of(step)).loss for step in range(2)]
    agree, engine._agree = engine._agree, lost
    with pytest.raises(RuntimeError, match="lost"):
        engine.step(batch_of(2))
    engine._agree = agree
    opened = engine.open
    assert (opened.number, opened.generation, opened.is_agreed, engine.num_steps) == (2, 7, False, 2)
    if ending == "apply":
        losses += [engine.apply_open().loss]
        before = [p.clone() for _, p in engine.named_parameters()]
        assert engine.apply_open().loss == losses[-1]
        assert all(torch.equal(a, b) for a, (_, b) in zip(before, engine.named_parameters(), strict=True))
    else:
        engine.discard()
        losses += [engine.step(batch_of(2)).loss]
    losses += [engine.step(batch_of(step)).loss for step in range(3, STEPS)]
    engine.close()
    assert told == list(range(STEPS))
    return losses


def lost(opened):
    raise RuntimeError("lost")


def all_ways():
    return undisturbed(), cut_short("apply"), cut_short("discard")


def test_a_step_without_its_word_is_applied_once_or_computed_again():
    for wanted, applied, redone in run_ranks(3, all_ways):
        assert applied == pytest.approx(wanted, abs=1e-12)
        assert redone == pytest.approx(wanted, abs=1e-12)


def groups_left():
    def refuses(parameters):
        raise ValueError("no optimizer")

    with pytest.raises(ValueError, match="no optimizer"):
        engine_of(refuses)
    return len(dist.distributed_c10d._world.pg_map)


def test_an_engine_that_cannot_be_made_leaves_no_group_behind():
    assert run_ranks(3, groups_left) == [1, 1, 1]


def update_fails():
    """In its middle, on every rank: what it says then, and whether it is half done."""
    engine, said = engine_of(), []
    engine.survival = Alone()
    engine.step(batch_of(0))
    said.append(is_half_done(engine))
    step, engine.backend.step = engine.backend.step, lost_update
    with pytest.raises(RuntimeError, match="lost"):
        engine.step(batch_of(1))
    engine.backend.step = step
    said.append(is_half_done(engine))
    with pytest.raises(LostStateError, match="step 1 failed in its middle on this rank"):
        engine.apply_open()
    assert engine.num_steps == 1
    engine.close()
    return said


def lost_update():
    raise RuntimeError("lost")


def test_an_optimizer_step_that_failed_is_not_done_again():
    """It has scaled and clipped the gradients in place, and may have changed parameters."""
    assert run_ranks(3, update_fails) == [[False, True]] * 3


def differ():
    """Whether a rank holds a step in which all were given other batches."""
    engine = engine_of()
    engine.survival = Alone()
    with pytest.raises(DisagreementError, match="different samples"):
        engine.step(batch_of(dist.get_rank()))
    holds = engine.open is not None
    engine.close()
    return holds


def test_no_rank_holds_a_step_in_which_ranks_differ():
    """Else a death at that moment would have it applied."""
    assert run_ranks(3, differ) == [False] * 3
