"""A change of plan carries along what is no plain weight: buffers, experts, what a script set by hand."""

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.precision import Precision
from arachne_runtime.errors import UnsupportedPlanError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Plan
from arachne_runtime.surroundings import lone_plan
from arachne_runtime.testing import run_ranks
from bench.cases import Case, engine_of, gap, train_plainly
from bench.exactness_experts import ExpertsCase
from bench.exactness_replans import ReplanCase, changes_of, train_through
from tests.test_replan import (
    BLOCKS,
    CHAIN,
    EXACT,
    TURNED,
    WIDE,
    Numbered,
    fails_then_goes_on,
    plan_of,
    stage,
    tiny,
)


@dataclass(frozen=True)
class ExpertsThrough(ExpertsCase):
    """Experts whose tiles change before each step but the first."""

    next_plans: tuple[Plan, ...] = ()


APART = plan_of((6, stage((0, BLOCKS), (1, "a:0"), (1, "a:1"), expert_parallel=2)))
CUT = plan_of((4, stage((0, BLOCKS), (2, "a:1"), (1, "a:0"), expert_tensor=2)))
WHOLE = plan_of((6, stage((0, 2), (2, "a:0")), stage((2, BLOCKS), (2, "a:1"))))


@pytest.mark.parametrize("plans", [(APART, CUT, WHOLE), (WHOLE, APART, CUT)])
def test_experts_change_their_tiles(plans):
    case = ExpertsThrough(plan=plans[0], next_plans=plans[1:], adam=True)
    for outcome in run_ranks(2, train_through, case):
        off = gap(outcome, train_plainly(case))
        assert max(off.loss, off.norm, off.parameter) < EXACT


WIDE_SPLIT = plan_of((3, stage((0, BLOCKS), (3, "a:0"), (1, "b:0"), zero=1)))
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


@needs_deepspeed
@pytest.mark.parametrize("plans", [(CHAIN, WIDE_SPLIT, TURNED), (TURNED, WIDE_SPLIT, WIDE)])
@pytest.mark.parametrize("adam", [True, False])
def test_blocks_that_the_first_process_lacks_come_under_zero(plans, adam):
    """DeepSpeed hands round the parameters of the group's first process, which has not got them all yet."""
    case = ReplanCase(plan=plans[0], next_plans=plans[1:], adam=adam, scheduled=True)
    for outcome in run_ranks(2, train_through, case):
        off = gap(outcome, train_plainly(case))
        assert max(off.loss, off.norm, off.parameter) < EXACT


@needs_deepspeed
def test_a_change_to_zero_that_fails_leaves_the_old_parameters():
    case = ReplanCase(plan=CHAIN, next_plans=(WIDE_SPLIT, WIDE_SPLIT), adam=True)
    wanted = train_plainly(case).losses
    for losses, told in run_ranks(2, fails_then_goes_on, case, "unpack"):
        assert np.allclose(losses, wanted, rtol=0, atol=EXACT)
        assert "the job keeps its plan" in told


AT_ONCE = plan_of((1, stage((0, 3), (12, "a:0")), stage((3, 5), (12, "b:0"))))
AT_ONCE_LATER = plan_of((1, stage((0, 1), (12, "b:0")), stage((1, 5), (12, "a:0"))))


def normed():
    linear = [nn.Linear(3, 3) for _ in range(3)]
    return nn.Sequential(linear[0], nn.BatchNorm1d(3), linear[1], nn.BatchNorm1d(3), linear[2])


def recipe(**options):
    given = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.05),
        "loss": lambda output, batch: output.square().mean(),
        "dtype": torch.float64,
    }
    return Recipe(**given | options)


def batch(step):
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(step)).double()


def through_norms(plans):
    """Losses of four steps, and of an evaluation, which goes by the running means."""
    engine = Engine(plans[0], ModelParts.of(normed), recipe())
    changes, losses = changes_of(engine), []
    for step in range(4):
        if step and step < len(plans):
            changes.to(plans[step])
        losses.append(engine.step(batch(step)).loss)
    losses.append(engine.evaluate([batch(9)]).loss)
    engine.close()
    return losses


def test_running_means_go_along():
    wanted = through_norms([lone_plan(5)])
    for losses in run_ranks(2, through_norms, [AT_ONCE, AT_ONCE_LATER, AT_ONCE]):
        assert np.allclose(losses, wanted, rtol=0, atol=EXACT)


def by_hand(next_plans):
    """The script freezes a parameter, sets a learning rate and a loss scale; plans may change meanwhile."""
    engine = Engine(CHAIN if next_plans else lone_plan(BLOCKS), ModelParts.of(tiny), recipe())
    changes, losses = changes_of(engine), []
    for step in range(4):
        if step == 1:
            for name, parameter in engine.named_parameters():
                parameter.requires_grad_(name != "blocks.2.weight")
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.3
        if step > 1 and next_plans:
            changes.to(next_plans[step - 2])
        losses.append(engine.step(batch(step)).loss)
    engine.close()
    return losses


def test_what_the_script_set_by_hand_stays():
    wanted = by_hand(())
    for losses in run_ranks(2, by_hand, (TURNED, WIDE)):
        assert np.allclose(losses, wanted, rtol=0, atol=EXACT)


def scale_after_a_change():
    engine = engine_of(Case(plan=CHAIN, precision=Precision.FP16, dtype=torch.float32))
    engine.step(Case(plan=CHAIN, dtype=torch.float32).batch(0))
    before = (engine.scale.value, engine.scale.num_fine)
    changes_of(engine).to(TURNED)
    return before, (engine.scale.value, engine.scale.num_fine), engine.num_steps


def test_the_loss_scale_stays():
    for before, after, num_steps in run_ranks(2, scale_after_a_change):
        assert before == after
        assert before[1] == num_steps == 1


class Rows(nn.Module):
    """Means over its features: another result on a part of them, and no module says so."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden - hidden.mean(-1, keepdim=True))


@arachne.pipelined(blocks="layers", tensor_parallel={"up": "colwise", "down": "rowwise"})
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Rows(), Rows()])


APART_2 = plan_of((2, stage((0, 2), (1, "a:0"), (1, "a:1"))), rows=4)
SHARED_2 = plan_of((2, stage((0, 2), (2, "a:0", "a:1"))), rows=4)


def shared_after_three_steps():
    engine = Engine(APART_2, ModelParts.of(Centred), recipe())
    for step in range(3):
        engine.step(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).double())
    changes_of(engine).to(SHARED_2)
    try:
        engine.step(torch.ones(4, 8).double())
    except UnsupportedPlanError as error:
        return str(error)
    finally:
        engine.close()


def test_the_first_step_by_another_plan_is_looked_at_like_a_first_step():
    """The fourth step of a job is not looked at; the first by a plan that shares blocks out must be."""
    assert all("gives another result" in told for told in run_ranks(2, shared_after_three_steps))


def loads_ahead():
    """Workers of the loader have read on for the old plan when the new one comes."""
    with arachne.Session(CHAIN, device="cpu") as session:
        engine = session.engine(tiny, optimizer=torch.optim.SGD, loss=squared, dtype=torch.float64)
        seen = []
        for step, rows in enumerate(session.batches(Numbered(), 12, seed=4, num_workers=1)):
            seen.append([i for _, (_, numbers) in rows.pieces for i in numbers.tolist()])
            engine.step(rows)
            if step == 1:
                session.replan(WIDE)
        return seen, session.plan == WIDE


def squared(output, batch):
    return output.square().mean()


def test_samples_that_were_loaded_ahead_are_loaded_anew():
    order = arachne.data.GlobalOrder(num_samples=42, global_batch=12, seed=4)
    (first, changed), (second, _) = run_ranks(2, loads_ahead)
    assert changed
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        everything = order.samples(step, range(order.num_rows(step)))
        if step < 2:  # both ends of the pipeline read all samples
            assert mine == theirs == everything
        else:
            assert sorted(mine + theirs) == sorted(everything)
