"""Replicas that play in lockstep: one without rows still joins what they compute together."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as together
import torch.nn.functional as F
from torch import nn

from arachne_runtime.data.loader import LoadedRows
from arachne_runtime.engine import Engine, Recipe, refusals
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.placement import holding, places_of
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks


class Mixture(nn.Module):
    """Sums something over the group in which it is told to play, as experts do, and needs their gradients."""

    group = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        if self.group is not None:
            total = together.all_reduce(y.sum()[None], group=self.group)
            y = y + (total - total)
        return y


def plan(stages, schedule):
    pipeline = Pipeline(micro_batches=3, micro_batch=3, stages=stages)
    return Plan(model="x", global_batch=9, sequence=1, schedule=schedule, pipelines=(pipeline,))


def stage(layers, *shares, first=0, experts=1):
    replicas = tuple(Replica(devices=(f"n:{first + i}",), share=share) for i, share in enumerate(shares))
    return Stage(layers=layers, replicas=replicas, expert_parallel=experts)


MIDDLE = (stage((0, 1), 3), stage((1, 3), 1, 2, first=1, experts=2), stage((3, 4), 3, first=3))
FIRST = (stage((0, 2), 2, 1, experts=2), stage((2, 4), 1, 2, first=2, experts=2))


def batch(step, num_rows):
    random = torch.Generator().manual_seed(step)
    return torch.randn(num_rows, 3, generator=random), torch.randn(num_rows, 3, generator=random)


def model():
    return nn.Sequential(Mixture(), nn.Tanh(), Mixture(), nn.Linear(3, 3))


def recipe():
    return Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda out, batch: F.mse_loss(out, batch[1]),
        dtype=torch.float64,
    )


class Loaded:
    """Only what a rank asked for, in ``float64``."""

    def __init__(self, engine, step, num_rows):
        tree = tuple(t.double() for t in batch(step, num_rows))
        self.held = LoadedRows(
            num_rows,
            tuple(
                (rows, tuple(t[rows.start : rows.stop] for t in tree))
                for rows in engine.needed_rows(num_rows)
            ),
        )


def train(the_plan, sizes, blocking=False):
    refusals.refuse_unrunnable = lambda plan: None  # experts are not what is tested here
    groups = {}
    for members in sorted(
        {tuple(sorted(holders(the_plan, s))) for s in range(len(the_plan.pipelines[0].stages))}
    ):
        groups[members] = dist.new_group(list(members))
    engine = Engine(the_plan, ModelParts.of(model), recipe(), blocking=blocking)
    for place, held in zip(engine.places, engine.stages, strict=True):
        if holding(the_plan, place)[1].expert_parallel > 1:
            for module in held.modules():
                if isinstance(module, Mixture):
                    module.group = groups[tuple(sorted(holders(the_plan, place.stage)))]
    losses = [engine.step(Loaded(engine, step, size).held).loss for step, size in enumerate(sizes)]
    found = {name: p.detach().clone() for name, p in engine.named_parameters()}
    engine.close()
    return losses, found


def holders(the_plan, stage):
    ranks = range(len(the_plan.devices))
    return [r for r in ranks if any(place.stage == stage for place in places_of(the_plan, r))]


def alone(sizes):
    the_plan = Plan(
        model="x", global_batch=9, sequence=1,
        pipelines=(Pipeline(micro_batches=1, micro_batch=9, stages=(stage((0, 4), 9),)),),
    )  # fmt: skip
    return Engine(the_plan, ModelParts.of(model), recipe()), sizes


@pytest.mark.parametrize("schedule", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE, ScheduleKind.GPIPE])
@pytest.mark.parametrize("stages", [MIDDLE, FIRST], ids=["middle", "ends"])
def test_a_replica_without_rows_plays_on(stages, schedule):
    sizes = (9, 4, 1, 2)
    engine, _ = alone(sizes)
    wanted = [engine.step(tuple(t.double() for t in batch(i, n))).loss for i, n in enumerate(sizes)]
    parameters = dict(engine.named_parameters())
    for losses, found in run_ranks(4, train, plan(stages, schedule), sizes, schedule == "gpipe"):
        assert losses == pytest.approx(wanted, abs=1e-12)
        for name, value in found.items():
            assert (value - parameters[name]).abs().max() < 1e-12
