"""Outputs that nothing uses: what made them has no gradient, as in one process, and is not stepped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.answers import Answers
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks

WIDTH, ROWS = 4, 8


class Line(nn.Module):
    """One tensor in, one out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Forks(Line):
    """Gives a second tensor, of parameters of its own."""

    def __init__(self):
        super().__init__()
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x), self.aside(x)


class Carries(Line):
    """Hands the second tensor on."""

    def forward(self, x, aside):
        return super().forward(x), aside


class Drops(Line):
    """Uses the second tensor for nothing."""

    def forward(self, x, aside):
        return self.linear(x)


class UsesSome(Line):
    """Uses the second tensor of some samples: of none in a micro-batch, now and then."""

    def forward(self, x, aside):
        wanted = aside[:, 1] > 0.5
        return self.linear(x) + (aside * wanted[:, None] if wanted.any() else 0)


class Stops(Line):
    """No gradient leaves it, as in linear probing."""

    def forward(self, x):
        return self.linear(x.detach())


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class GivesNone(Line):
    """A function of the user's own says that there is no gradient."""

    def forward(self, x):
        return self.linear(_NoGradient.apply(x))


MODELS = {
    "dropped": (Forks, Carries, Drops, Line),
    "detached": (Line, Line, Stops, Line),
    "none": (Line, Line, GivesNone, Line),
    "sometimes": (Forks, Carries, UsesSome, Line),
}


class Row(nn.Sequential):
    """Blocks whose outputs are the arguments of the next."""

    def forward(self, *tensors):
        for block in self:
            tensors = block(*tensors)
            tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        return tensors[0]


def model(name):
    return Row(*(kind() for kind in MODELS[name]))


def stage(layers, *shares, start):
    return Stage(
        layers=layers,
        replicas=tuple(Replica(devices=(f"a:{start + i}",), share=share) for i, share in enumerate(shares)),
    )


def plan_of(schedule, *stages, micro_batches=4):
    rows = sum(stages[0].shares)
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=rows, stages=stages)
    return Plan(
        model="t", global_batch=rows * micro_batches, sequence=1, schedule=schedule, pipelines=(pipeline,)
    )


def line(schedule):
    return plan_of(schedule, *(stage((i, i + 1), 2, start=i) for i in range(4)))


PLANS = {
    "1f1b": line(ScheduleKind.ONE_F_ONE_B),
    "gpipe": line(ScheduleKind.GPIPE),
    "zero_bubble": line(ScheduleKind.ZERO_BUBBLE),
    "interleaved": plan_of(
        ScheduleKind.INTERLEAVED, *(stage((i, i + 1), 2, start=i % 2) for i in range(4))
    ),
    "single rows": plan_of(
        ScheduleKind.ONE_F_ONE_B,
        stage((0, 1), 1, start=0), stage((1, 2), 1, start=1), stage((2, 4), 1, start=2),
        micro_batches=8,
    ),
    "wide": plan_of(
        ScheduleKind.ONE_F_ONE_B, stage((0, 2), 3, 1, start=0), stage((2, 4), 2, 2, start=2), micro_batches=2
    ),
}  # fmt: skip


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def batch(step):
    torch.manual_seed(step)
    return torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()


def train(name, plan, blocking=False):
    recipe = Recipe(optimizer=adam, loss=mse, dtype=torch.float64, seed=3)
    engine = Engine(plan, ModelParts.of(lambda: model(name)), recipe, blocking=blocking)
    for step in range(3):
        engine.step(batch(step))
    found = {n: (p.detach().clone(), p.grad is not None) for n, p in engine.named_parameters()}
    engine.close()
    return found


def train_all(names, plan, blocking):
    return {name: train(name, plan, blocking) for name in names}


def plainly(name):
    whole = ModelParts.of(lambda: model(name)).whole(seed=3, dtype=torch.float64)
    optimizer = adam(whole.parameters())
    for step in range(3):
        optimizer.zero_grad()
        mse(whole(batch(step)[0]), batch(step)).backward()
        optimizer.step()
    return {f"blocks.{n}": (p.detach(), p.grad is not None) for n, p in whole.named_parameters()}


@pytest.mark.parametrize(("plan", "blocking"), [(name, False) for name in PLANS] + [("wide", True)])
def test_what_nothing_uses_has_no_gradient_under_any_schedule(plan, blocking):
    names = tuple(MODELS)
    for found in run_ranks(len(PLANS[plan].devices), train_all, names, PLANS[plan], blocking):
        for name in names:
            wanted = plainly(name)
            for parameter, (value, trained) in found[name].items():
                assert trained == wanted[parameter][1], (name, parameter)
                torch.testing.assert_close(value, wanted[parameter][0], rtol=0, atol=1e-12)


def test_the_models_leave_something_unused():
    unused = {name: [n for n, (_, trained) in plainly(name).items() if not trained] for name in MODELS}
    assert unused["dropped"] == ["blocks.0.aside.weight", "blocks.0.aside.bias"]
    assert unused["detached"] == unused["none"] != []
    assert unused["sometimes"] == []


def test_notes_end_once_all_gradients_were_there():
    answers = Answers(torch.device("cpu"))
    assert answers.note((1, 2), (True, False)).tolist() == [1, 0]
    assert answers.note((1, 2), (True, True)).tolist() == [1, 1]
    assert answers.note((1, 2), (True, False)) is None
    assert answers.note((0, 2), (False,)).tolist() == [0]
    assert answers.note((0, 3), ()) is None
