"""Zero-bubble backwards: the first half leaves the gradients of weights out, the second computes them."""

import functools
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import nn
from torch.utils.checkpoint import checkpoint

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.player import Player
from arachne_runtime.errors import ModelError
from arachne_runtime.model import ModelParts
from arachne_runtime.model.deferral import Deferral
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.schedule import deferred, in_flight, num_rows
from arachne_runtime.testing import run_ranks
from bench.cases import Case, gap, train_by_plan, train_plainly
from bench.exactness_tensor import TensorCase


def line(*cut, recompute=False, schedule=ScheduleKind.ZERO_BUBBLE):
    stages = tuple(
        Stage(layers=edges, recompute=recompute, replicas=(Replica(devices=(f"n:{i}",), share=2),))
        for i, edges in enumerate(pairwise((0, *cut)))
    )
    pipeline = Pipeline(micro_batches=4, micro_batch=2, stages=stages)
    return Plan(model="tiny", global_batch=8, sequence=4, schedule=schedule, pipelines=(pipeline,))


class Products(nn.Module):
    """Every product that is deferred, one weight used twice, one frozen, one that is computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.right = nn.Parameter(torch.randn(4, 4))
        self.added = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.computed = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = self.frozen(self.twice(self.twice(self.linear(x).tanh())))
        x = torch.addmm(self.bias, (x @ self.right).flatten(0, 1), self.added).view_as(x)
        return F.linear(input=x, weight=self.computed * 2)


DEFERRED = {"linear.weight", "twice.weight", "right", "added"}


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def alike(found, wanted, part):
    """Up to a part of the largest element."""
    return (found - wanted).abs().max() <= part * wanted.abs().max()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_both_halves_give_what_autograd_gives(autocast, needs_grad):
    torch.manual_seed(0)
    model, x = Products(), torch.randn(3, 2, 4, requires_grad=needs_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.square().sum().backward()
    wanted, wanted_x = gradients(model), x.grad
    model.zero_grad()
    x.grad = None
    deferral = Deferral()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), deferral:
        again = model(x)
    assert torch.equal(again, out)
    deferral.is_due = True
    again.square().sum().backward()
    assert gradients(model).keys() == wanted.keys() - DEFERRED
    deferral.pay()
    assert gradients(model).keys() == wanted.keys()
    close = functools.partial(alike, part=1e-2 if autocast else 1e-6)  # bfloat16 keeps 8 bits
    for name, gradient in gradients(model).items():
        assert close(gradient, wanted[name])
        assert gradient.dtype is torch.float32
    if needs_grad:
        assert close(x.grad, wanted_x)


class Recomputes(nn.Module):
    """Recomputes a part of itself, in which all tensors have one shape."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def inner(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_a_block_recomputes_by_itself_has_its_gradients_in_the_first_half():
    """What it saves must be what it saves again, where the products are plain ones."""
    torch.manual_seed(0)
    model, x = Recomputes().double(), torch.randn(4, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    deferral = Deferral()
    with deferral:
        out = model(x)
    deferral.is_due = True
    out.square().sum().backward()
    deferral.pay()
    found = gradients(model)
    assert all(alike(found[name], wanted[name], 1e-12) for name in wanted)


def test_what_a_product_takes_may_not_be_changed_in_place():
    """As autograd refuses it."""
    linear, deferral = nn.Linear(2, 2), Deferral()
    x = torch.randn(1, 2)
    with deferral:
        out = linear(x)
    x.zero_()
    deferral.is_due = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class TakesGradients(nn.Module):
    """Uses a gradient in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        x = x.requires_grad_()
        return torch.autograd.grad(self.linear(x).sum(), x)[0]


def test_a_block_that_takes_gradients_itself_is_refused():
    alone = Stage(layers=(0, 1), replicas=(Replica(devices=("n:0",), share=2),))
    pipeline = Pipeline(micro_batches=1, micro_batch=2, stages=(alone,))
    plan = Plan(model="x", global_batch=2, sequence=1, schedule="zero_bubble", pipelines=(pipeline,))
    recipe = Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda out, batch: out.sum())
    engine = Engine(plan, ModelParts.of(lambda: nn.Sequential(TakesGradients())), recipe)
    with pytest.raises(ModelError, match="takes gradients inside its forward"):
        engine.step(torch.randn(2, 3))


def seen_by_action(case):
    """Parameters of this rank that have a gradient after each action of the first step; and the outcome."""
    seen, play = [], Player.play

    def noting(self, action, *rest):
        play(self, action, *rest)
        if len(seen) < 3 * 4:
            named = self._play.stage.named_parameters()
            seen.append((str(action), {name for name, p in named if p.grad is not None}))

    Player.play = noting
    try:
        return train_by_plan(case), seen
    finally:
        Player.play = play


@pytest.mark.parametrize("recompute", [False, True])
def test_the_second_half_computes_what_the_first_left(recompute):
    case = Case(line(1, 3, 5, recompute=recompute), clip_norm=0.1, adam=True)
    wanted = train_plainly(case)
    found = run_ranks(3, seen_by_action, case)
    for outcome, _ in found:
        assert max(vars(gap(outcome, wanted)).values()) < 1e-9
    middle = dict(found[1][1])
    assert list(middle)[:5] == ["1F0", "1F1", "1I0", "1F2", "1I1"]
    assert middle["1F1"] == set()
    matrices = {f"blocks.{block}.{name}.weight" for block in (1, 2) for name in ("mix", "out", "seldom")}
    assert middle["1I0"]
    assert not middle["1I0"] & matrices
    assert not middle["1I1"] & matrices
    assert middle["1W3"] & matrices
    (head,) = {name for name in dict(found[2][1])["2W3"] if "logits" in name}
    assert head not in dict(found[2][1])["2I0"]


def test_an_input_gradient_leaves_before_the_gradients_of_weights():
    names = [name for name, _ in run_ranks(3, seen_by_action, Case(line(1, 3, 5)))[2][1]]
    assert names.index("2I2") < names.index("2W0")


def test_weights_that_a_group_shares_are_left_out_too():
    """Each rank computes the gradient of its own part later."""
    shared = Stage(layers=(0, 3), replicas=(Replica(devices=("n:0", "n:1"), share=2),))
    rest = Stage(layers=(3, 5), replicas=(Replica(devices=("n:2",), share=2),))
    pipeline = Pipeline(micro_batches=4, micro_batch=2, stages=(shared, rest))
    plan = Plan(
        model="tiny", global_batch=8, sequence=4, schedule=ScheduleKind.ZERO_BUBBLE, pipelines=(pipeline,)
    )
    case = TensorCase(plan, clip_norm=0.1, adam=True)
    wanted = train_plainly(case)
    found = run_ranks(3, seen_by_action, case)
    for outcome, _ in found:
        assert max(vars(gap(outcome, wanted)).values()) < 1e-9
    seen = dict(found[1][1])
    matrices = {f"blocks.1.{name}.weight" for name in ("up", "down", "attention.qkv", "attention.out")}
    assert seen["0I0"]
    assert not seen["0I0"] & matrices
    assert seen["0W0"] >= matrices


@pytest.mark.parametrize("schedule", ScheduleKind)
def test_no_stage_holds_more_micro_batches_than_is_priced(schedule):
    stages = line(1, 3, 4, 6).pipelines[0].stages
    if schedule is ScheduleKind.INTERLEAVED:
        sets = [stage.replicas for stage in stages[:2]] * 2
        stages = [structs.replace(s, replicas=r) for s, r in zip(stages, sets, strict=True)]
    pipeline = Pipeline(micro_batches=6, micro_batch=2, stages=tuple(stages))
    plan = Plan(model="tiny", global_batch=12, sequence=4, schedule=schedule, pipelines=(pipeline,))
    rows = num_rows(schedule, pipeline)
    for by_stage in run_ranks(rows, most_held, Case(plan)):
        for stage, (kept, owed) in by_stage.items():
            assert kept == in_flight(schedule, stage, 4, 6, rows)
            assert owed <= deferred(schedule, stage, 6) + 1


def most_held(case):
    """By stage, the most micro-batches that wait for a backward or half of one; and for the second half."""
    most, play = {}, Player.play

    def noting(self, *given):
        play(self, *given)
        kept, owed = most.get(self._play.index, (0, 0))
        kept = max(kept, len(self._held) + len(self._owing))
        most[self._play.index] = kept, max(owed, len(self._owing))

    Player.play = noting
    try:
        train_by_plan(case)
    finally:
        Player.play = play
    return most
