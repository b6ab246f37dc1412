"""Losses that blocks add: the same sum for every split of the batch, on any stage, recomputed or not."""

import pytest
import torch
from torch import nn

from arachne_runtime import MoE, add_loss, extra_losses, pipelined
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks

WIDTH, SEQUENCE, ROWS, STEPS = 4, 3, 8, 3


class Layer(nn.Module):
    """Adds what it mixes, and two losses: of its experts and of the size of its output."""

    def __init__(self):
        super().__init__()
        self.moe = MoE(WIDTH, 5, 4, 2, balance=0.3)

    def forward(self, x):
        y = x + self.moe(x)
        add_loss(0.01 * y.square().mean())
        return y


class Head(nn.Module):
    """Activations to one number a sample, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        y = self.out(x).mean((1, 2))
        add_loss(0.1 * y.square().mean())
        return y


@pipelined(blocks="layers", last="head")
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = Head()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(output, batch):
    return (output - batch["y"]).square().mean()


def summed(output, batch):
    return (output - batch["y"]).square().sum()


def batch_of(step, num_rows=ROWS):
    random = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(num_rows, SEQUENCE, WIDTH, generator=random, dtype=torch.float64),
        "y": torch.randn(num_rows, generator=random, dtype=torch.float64),
    }


def rows_of(step):
    return ROWS - 3 * (step == 1)


def stage(layers, *replicas, recompute=False):
    found = tuple(Replica(devices=(device,), share=share) for device, share in replicas)
    return Stage(layers=layers, replicas=found, recompute=recompute)


def plan_of(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B):
    return Plan(model="tiny", global_batch=ROWS, sequence=SEQUENCE, schedule=schedule, pipelines=pipelines)


ALONE = plan_of(Pipeline(micro_batches=1, micro_batch=8, stages=(stage((0, 4), ("a:0", 8)),)))
IN_PARTS = plan_of(
    Pipeline(micro_batches=4, micro_batch=2, stages=(stage((0, 4), ("a:0", 2), recompute=True),))
)
STAGES = plan_of(
    Pipeline(micro_batches=2, micro_batch=3, stages=(
        stage((0, 1), ("a:0", 1), ("a:1", 2), recompute=True), stage((1, 4), ("a:2", 3)),
    )),
    Pipeline(micro_batches=1, micro_batch=2, stages=(stage((0, 3), ("b:0", 2)), stage((3, 4), ("b:1", 2)))),
)  # fmt: skip


def recipe(of_items):
    return Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        loss=summed if of_items else loss,
        inputs=lambda batch: (batch["x"],),
        num_items=(lambda batch: len(batch["y"])) if of_items else None,
        dtype=torch.float64,
    )


def by_plan(plan, of_items=False):
    engine = Engine(plan, ModelParts.of(Model), recipe(of_items))
    reports = [engine.step(batch_of(step, rows_of(step))) for step in range(STEPS)]
    values = {name: p.detach().clone() for name, p in engine.named_parameters()}
    engine.close()
    return [r.loss for r in reports], [r.grad_norm for r in reports], values


def plainly():
    """The loop of a script without an engine."""
    model = ModelParts.of(Model).whole(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        batch = batch_of(step, rows_of(step))
        with extra_losses() as added:
            output = model(batch["x"])
        assert len(added) == 7
        total = loss(output, batch) + sum(added)
        optimizer.zero_grad()
        total.backward()
        losses.append(total.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
    values = {
        name.replace("layers.", "blocks.").replace("head.", "blocks.3."): p.detach()
        for name, p in model.named_parameters()
    }
    return losses, norms, values


@pytest.mark.parametrize("of_items", [False, True])
@pytest.mark.parametrize("plan", [ALONE, IN_PARTS, STAGES], ids=["alone", "in parts", "stages"])
def test_a_split_of_the_batch_does_not_change_them(plan, of_items) -> None:
    losses, norms, values = plainly()
    for found in run_ranks(len(plan.devices), by_plan, plan, of_items):
        assert found[0] == pytest.approx(losses, abs=1e-12)
        assert found[1] == pytest.approx(norms, abs=1e-12)
        for name, value in found[2].items():
            assert (value - values[name]).abs().max() < 1e-12


class Frozen(nn.Module):
    """Its only gradient is of the loss that it adds."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, x):
        add_loss(self.scale(x).square().mean())
        return x


def of_the_added_loss_alone():
    plan = plan_of(
        Pipeline(
            micro_batches=2, micro_batch=4, stages=(stage((0, 1), ("a:0", 4)), stage((1, 2), ("a:1", 4)))
        )
    )
    engine = Engine(plan, ModelParts.of(lambda: nn.Sequential(Frozen(), Head())), recipe(False))
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    engine.step(batch_of(0))
    after = dict(engine.named_parameters())
    engine.close()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def test_a_stage_whose_output_needs_no_gradient_trains_by_what_it_adds() -> None:
    first, second = run_ranks(2, of_the_added_loss_alone)
    assert first == ["blocks.0.scale.weight", "blocks.0.scale.bias"]
    assert second == ["blocks.1.out.weight", "blocks.1.out.bias"]
