"""ZeRO-2 and 3 of data-parallel plans: DeepSpeed sums and splits gradients (and parameters), exactly."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.precision import Precision
from arachne_runtime.engine.refusals import refuse_recipe
from arachne_runtime.errors import (
    NonFiniteGradientError,
    UnsupportedPlanError,
    UsageError,
    WorkerFailedError,
)
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline
from arachne_runtime.testing import run_ranks
from bench.cases import Case, gap, train_all_by_plan, train_plainly
from bench.exactness_tensor import Fused, Layer, TensorCase
from tests.test_zero import WIDE, bytes_of_states, plan_of, stage, with_zero

TWO = plan_of(
    Pipeline(micro_batches=2, micro_batch=3, stages=(stage((0, 4), ("a:0", 1), ("a:1", 2), zero=2),))
)
SINGLE = {"dtype": torch.float32, "sharded_logits": False}


class Part(Layer):
    """Uses its inner layers where a row begins with a low token: on some ranks, in some micro-batches."""

    def forward(self, x, marked, half, *, position):
        x = x + self.attention(self.norm(x) + position)
        if marked.any():
            x = x + self.down(F.gelu(self.up(x))) * marked[..., None]
        return x, marked, half


@arachne.pipelined(first="embed", blocks="layers", last="head", context="context")
class Parts(Fused):
    """A decoder of such layers."""

    def __init__(self, num_layers, tied):
        super().__init__(0, tied)
        self.layers = nn.ModuleList(Part(True) for _ in range(num_layers))
        for layer in self.layers:
            del layer.fixed


class UsedByRows(TensorCase):
    """A case whose ranks use other parameters in a micro-batch."""

    def model(self):
        return Parts(self.plan.num_blocks - 2, self.tied)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("plan", [WIDE, TWO])
def test_split_gradients_train_like_one_process(zero, plan):
    plan = with_zero(plan, zero)
    short = (plan.global_batch, 2, plan.global_batch - 1)  # 2 rows leave most replicas without any
    cases = [
        TensorCase(plan, clip_norm=0.1, scheduled=True, **SINGLE),
        TensorCase(plan, rows=short, tied=False, **SINGLE),
        TensorCase(plan, adam=True, by_items=True, fused=False, **SINGLE),
    ]
    if zero == 2:
        cases += [TensorCase(recomputed(plan), **SINGLE), UsedByRows(plan, **SINGLE)]
    found = run_ranks(len(plan.devices), train_all_by_plan, cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        wanted = train_plainly(case)
        for outcome in outcomes:
            between = gap(outcome, wanted)
            assert max(between.loss, between.norm) < 1e-5, case
            assert between.parameter < (1e-4 if case.adam else 1e-5), case  # Adam steps on rounding


def recomputed(plan):
    return with_zero(plan, plan.pipelines[0].stages[0].zero, recompute=True)


@pytest.mark.parametrize("zero", [2, 3])
def test_each_rank_keeps_its_part_of_the_states(zero):
    whole = 5 * (64 * 64 + 64) * 4 * 2
    found = run_ranks(3, bytes_of_states, with_zero(WIDE, zero))
    assert all(0.33 <= part / whole < 0.34 for part in found)


def elements_held(zero):
    parts = ModelParts.of(lambda: nn.Sequential(*[nn.Linear(9, 9) for _ in range(5)]))
    engine = engine_of(parts, zero)
    for _ in range(2):
        engine.step((torch.ones(18, 9), torch.ones(18, 9)))
    here = sum(p.numel() for _, p in engine.named_parameters())
    with engine.whole_parameters():
        whole = sum(p.numel() for _, p in engine.named_parameters())
    engine.close()
    return here, whole


def engine_of(parts, zero):
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
    )
    return Engine(with_zero(WIDE, zero), parts, recipe)


def linear_after_a_session():
    before = F.linear
    engine = engine_of(
        ModelParts.of(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(WIDE.num_blocks)))), 3
    )
    during = F.linear
    engine.close()
    return during is before, F.linear is before


def test_what_stage_3_puts_into_torch_goes_with_its_engine():
    assert run_ranks(3, linear_after_a_session) == [(False, True)] * 3


def test_stage_3_splits_the_parameters_between_steps():
    assert run_ranks(3, elements_held, 2) == [(450, 450)] * 3
    assert run_ranks(3, elements_held, 3) == [(0, 450)] * 3


class Seldom(nn.Module):
    """Uses its second layer on some rows only."""

    def __init__(self, above):
        super().__init__()
        self.above = above
        self.usual, self.seldom = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x):
        x = self.usual(x)
        return x + self.seldom(x) if bool(x[:, 0].gt(self.above).any()) else x


def never_used(zero):
    engine = engine_of(ModelParts.of(lambda: nn.Sequential(*[Seldom(1e9) for _ in range(5)])), zero)
    engine.step((torch.ones(18, 9), torch.ones(18, 9)))


class Chooses(nn.Module):
    """One of two layers of one shape, by the samples: gathering the wrong one would not show."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x):
        return self.high(x) if bool(x.abs().max() > 1) else self.low(x)


def called_by_rank():
    parts = ModelParts.of(lambda: nn.Sequential(Chooses(), nn.Linear(9, 9), nn.Linear(9, 9)))
    replicas = (("a:0", 1), ("a:1", 1))
    plan = plan_of(Pipeline(micro_batches=1, micro_batch=2, stages=(stage((0, 3), *replicas, zero=3),)))
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: output.mean(),
        stochastic=True,
    )
    Engine(plan, parts, recipe).step((torch.tensor([[9.0] * 9, [0.5] * 9]),))


def test_ranks_that_gather_other_parameters_do_not_step():
    with pytest.raises(WorkerFailedError, match="the ranks called other modules in this step"):
        run_ranks(2, called_by_rank, timeout_s=20)


@pytest.mark.parametrize("zero", [2, 3])
def test_parameters_without_a_gradient_are_refused_before_the_step(zero):
    with pytest.raises(WorkerFailedError, match=r"no sample of this step gives .*seldom.weight"):
        run_ranks(3, never_used, zero)


def test_other_dtypes_are_refused():
    with pytest.raises(WorkerFailedError, match=r"holds torch.float64; ZeRO-2 needs .* torch.float32"):
        run_ranks(3, train_all_by_plan, [Case(with_zero(WIDE, 2))])


@pytest.mark.parametrize(
    "asked", [{"precision": Precision.FP16}, {"compile": "eager"}, {"accumulate": torch.float32}]
)
@pytest.mark.parametrize("zero", [2, 3])
def test_what_changes_gradients_later_is_refused(zero, asked):
    recipe = Recipe(optimizer=torch.optim.SGD, loss=F.mse_loss, **asked)
    with pytest.raises(
        UnsupportedPlanError, match=rf"zero is {zero}, which runs without {next(iter(asked))}"
    ):
        refuse_recipe(with_zero(WIDE, zero), recipe)
    refuse_recipe(with_zero(WIDE, 1), recipe)


def lines(num_frozen=0):
    """As many blocks as the plan has, the first of them frozen."""
    return ModelParts.of(
        lambda: nn.Sequential(
            *(nn.Linear(4, 4).requires_grad_(i >= num_frozen) for i in range(WIDE.num_blocks))
        )
    )


def goes_on_behind_a_nan(zero):
    """Losses of the steps; what is told of the one that is refused."""
    engine, told = engine_of(lines(), zero), []
    for step in range(3):
        torch.manual_seed(step)
        x, y = torch.randn(2, WIDE.global_batch, 4)
        if step == 1:
            x[0, 0] = math.nan
        try:
            told.append(engine.step((x, y)).loss)
        except NonFiniteGradientError as error:
            told.append(str(error))
    engine.close()
    return told


@pytest.mark.parametrize("zero", [2, 3])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_told(zero):
    num_ranks = len(WIDE.devices)
    whole, split = (run_ranks(num_ranks, goes_on_behind_a_nan, each) for each in (0, zero))
    for a, b in zip(whole, split, strict=True):
        assert f"a gradient is not finite; under ZeRO-{zero} no rank has whole gradients" in b[1]
        assert [b[0], b[2]] == pytest.approx([a[0], a[2]], rel=1e-5)


def thawed_later(zero):
    engine = engine_of(lines(num_frozen=1), zero)
    batch = torch.ones(WIDE.global_batch, 4), torch.ones(WIDE.global_batch, 4)
    engine.step(batch)
    for _, parameter in engine.named_parameters():
        parameter.requires_grad_(True)
    try:
        engine.step(batch)
    except UsageError as error:
        return str(error)
    finally:
        engine.close()


def test_a_parameter_that_is_thawed_later_is_refused():
    told = run_ranks(len(WIDE.devices), thawed_later, 2)
    assert all("was frozen when the engine was made" in each for each in told)
