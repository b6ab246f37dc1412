"""An optimizer that steps parameters together would step otherwise where each stage has a part of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.optimizer_rule import refuse_optimizer
from arachne_runtime.errors import UnsupportedPlanError, WorkerFailedError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks


def plan_of(*stages):
    pipeline = Pipeline(micro_batches=2, micro_batch=2, stages=stages)
    return Plan(model="tiny", global_batch=4, sequence=1, pipelines=(pipeline,))


def stage(layers, *devices):
    replicas = tuple(Replica(devices=(device,), share=2 // len(devices)) for device in devices)
    return Stage(layers=layers, replicas=replicas)


CUT = plan_of(stage((0, 1), "a:0"), stage((1, 2), "a:1"))
SIDE_BY_SIDE = plan_of(stage((0, 2), "a:0", "a:1"))


class Scaled(torch.optim.Optimizer):
    """Gradient descent whose rate some statistic of the gradients sets; ``of`` one parameter, or all."""

    def __init__(self, parameters, lr=0.1, of="all"):
        super().__init__(parameters, {"lr": lr, "of": of})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norms = [p.grad.norm() for p in group["params"]]
            for p, norm in zip(group["params"], norms, strict=True):
                scale = torch.stack(norms).norm() if group["of"] == "all" else norm
                p -= group["lr"] * p.grad / scale


class LearnsItsRate(Scaled):
    """As Prodigy does: it starts at 1e-6 and grows by what all parameters have in common (simplified)."""

    def __init__(self, parameters, lr=1.0):
        super().__init__(parameters, lr)
        self.rate, self.sums, self.first = 1e-6, [], []

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.sums:
            self.first = [p.clone() for p in parameters]
            self.sums = [torch.zeros_like(p) for p in parameters]
        for total, p in zip(self.sums, parameters, strict=True):
            total += self.rate * p.grad
        moved = sum(((f - p) * p.grad).sum() for f, p in zip(self.first, parameters, strict=True))
        weight = sum(total.abs().sum() for total in self.sums)
        self.rate = max(self.rate, 2 * float(moved / weight))
        for p in parameters:
            p -= self.rate * p.grad.sign()


class Wraps(torch.optim.Optimizer):
    """Keeps nothing of its own, and cannot be made from parameters."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], inner.defaults)

    def step(self, closure=None):
        self.inner.step()


class Picky(Scaled):
    """Takes no other parameters than the model's."""

    def __init__(self, parameters):
        parameters = list(parameters)
        assert [tuple(p.shape) for p in parameters] == [(3, 3), (3,)]
        super().__init__(parameters, of="each")


MADE = {
    "all": Scaled,
    "learns": LearnsItsRate,
    "wrapped": lambda p: Wraps(Scaled(p)),
    "warming up": lambda p: Scaled(p, lr=0.0),
    "each": lambda p: Scaled(p, of="each"),
    "wrapped Adam": lambda p: Wraps(torch.optim.AdamW(p)),
    "Adam": torch.optim.AdamW,
    "picky": Picky,
}


def train(plan, kind, stochastic=False):
    engine = Engine(
        plan,
        ModelParts.of(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))),
        Recipe(
            optimizer=MADE[kind],
            loss=lambda output, batch: F.mse_loss(output, batch[1]),
            stochastic=stochastic,
        ),
    )
    before = torch.random.get_rng_state()
    assert engine.step((torch.ones(4, 3), torch.zeros(4, 3))).is_finite
    return bool(torch.equal(before, torch.random.get_rng_state()))


@pytest.mark.parametrize("kind", ["all", "learns", "wrapped", "warming up"])
def test_what_steps_parameters_together_is_refused_where_stages_hold_parts(kind):
    told = r"UnsupportedPlanError: \w+ steps a parameter otherwise when another one is stepped with it"
    with pytest.raises(WorkerFailedError, match=told):
        run_ranks(2, train, CUT, kind)
    assert run_ranks(2, train, CUT, kind, True) == [True, True]


@pytest.mark.parametrize("kind", ["each", "wrapped Adam", "Adam", "picky"])
def test_what_treats_each_parameter_alone_is_fine(kind):
    assert run_ranks(2, train, CUT, kind) == [True, True]


def test_every_rank_that_holds_the_whole_model_steps_it_alike():
    assert run_ranks(2, train, SIDE_BY_SIDE, "all") == [True, True]


TENSOR = plan_of(Stage(layers=(0, 2), replicas=(Replica(devices=("a:0", "a:1"), share=2),)))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: Scaled(p, of="one"), "Scaled steps a part of a parameter otherwise than the whole"),
        (torch.optim.Adafactor, "Adafactor steps a part of a parameter otherwise than the whole"),
        (torch.optim.Muon, "Muon steps a part of a parameter otherwise than the whole"),
    ],
)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused_where_ranks_have_parts(make, told):
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(UnsupportedPlanError, match=told):
        refuse_optimizer(make([weight]), make, weight, TENSOR, stochastic=False)
    refuse_optimizer(make([weight]), make, weight, TENSOR, stochastic=True)
    refuse_optimizer(make([weight]), make, weight, SIDE_BY_SIDE, stochastic=False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_an_elementwise_optimizer_may_have_parts(kind):
    weight = nn.Parameter(torch.zeros(4, 4))
    refuse_optimizer(kind([weight]), kind, weight, TENSOR, stochastic=False)
