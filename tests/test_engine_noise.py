"""Gradient noise of plans: between replicas and pipelines, each parameter once, as one process tells it."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.batch import Group, SegmentNorms, measure_noise
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import UnsupportedPlanError, WorkerFailedError
from arachne_runtime.making import EngineMaker
from arachne_runtime.measure.hooks import Hooks
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.rows import micro_batch_rows, replica_rows
from arachne_runtime.testing import run_ranks
from bench.cases import Case
from bench.exactness_tensor import TensorCase

WIDTH, INNER, SEED, RATE = 3, 8, 3, 0.1
ROWS = (8, 5, 8)
"""By step; the full batch, a short one, and the full one."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x_BD):
        return x_BD + self.down(torch.tanh(self.up(x_BD)))


@arachne.pipelined(
    first="first", blocks="layers", last="last", tensor_parallel={"up": "colwise", "down": "rowwise"}
)
class Net(nn.Module):
    """Four blocks: (B, WIDTH) → (B, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x_BD):
        x_BD = self.first(x_BD)
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.last(x_BD)


def stage(layers, *replicas):
    found = (Replica(devices=tuple(f"a:{i}" for i in devices), share=share) for devices, share in replicas)
    return Stage(layers=layers, replicas=tuple(found))


def plan_of(*pipelines, sequence=1):
    rows = sum(p.micro_batches * p.micro_batch for p in pipelines)
    return Plan(model="tiny", global_batch=rows, sequence=sequence, pipelines=pipelines)


def pipeline(micro_batches, micro_batch, *stages):
    return Pipeline(micro_batches=micro_batches, micro_batch=micro_batch, stages=stages)


PLANS = {
    "unlike shares by stage": plan_of(
        pipeline(2, 4, stage((0, 2), ((0,), 3), ((1,), 1)), stage((2, 4), ((2,), 2), ((3,), 2)))
    ),
    "unlike pipelines, one tensor parallel": plan_of(
        pipeline(3, 2, stage((0, 2), ((0,), 2)), stage((2, 4), ((1,), 2))),
        pipeline(2, 1, stage((0, 4), ((2, 3), 1))),
    ),
}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS[step], WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, RATE)


def by_plan(plan):
    recipe = Recipe(optimizer=sgd, loss=mse, dtype=torch.float64, seed=SEED)
    engine = Engine(plan, ModelParts.of(Net), recipe, noise=True)
    found = [engine.step(batch(step)).noise for step in range(len(ROWS))]
    engine.close()
    return found


def groups_of(plan, block, num_rows):
    """Rows of the batch behind each gradient that the sums of a block take."""
    found = []
    for one, spans in zip(plan.pipelines, micro_batch_rows(plan, num_rows), strict=True):
        (holder,) = (s for s in one.stages if block in s.blocks)
        parts = [replica_rows(holder, span) for span in spans]
        for replica in range(len(holder.replicas)):
            found.append([row for part in parts for row in part[replica]])
    return [rows for rows in found if rows]


def segment_of(model, parameters, groups, x, y):
    h_J = []
    for rows in groups:
        loss = len(rows) * mse(model(x[rows]), (None, y[rows]))
        h_J.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    parts = [Group(weight=len(r), squared_norm=float(h @ h)) for r, h in zip(groups, h_J, strict=True)]
    return SegmentNorms(groups=parts, squared_norm=float(sum(h_J).square().sum()))


def by_hand(plan):
    model = ModelParts.of(Net).whole(seed=SEED, dtype=torch.float64)
    optimizer, found = sgd(model.parameters()), []
    blocks = (model.first, *model.layers, model.last)
    for step, num_rows in enumerate(ROWS):
        x, y = batch(step)
        groups = [groups_of(plan, block, num_rows) for block in range(len(blocks))]
        segments = [
            segment_of(model, list(block.parameters()), rows, x, y)
            for block, rows in zip(blocks, groups, strict=True)
            if len(rows) > 1
        ]
        seen = len(segments) == len(blocks)
        found.append(measure_noise(segments, samples=num_rows) if seen else None)
        optimizer.zero_grad()
        mse(model(x), (x, y)).backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("name", PLANS)
def test_noise_is_what_one_process_sees_between_the_same_groups(name):
    wanted = by_hand(PLANS[name])
    assert sum(one is not None for one in wanted) >= 2
    for found in run_ranks(len(PLANS[name].devices), by_plan, PLANS[name]):
        for ours, theirs in zip(found, wanted, strict=True):
            if theirs is None:
                assert ours is None
                continue
            assert ours.samples == theirs.samples
            assert (ours.noise, ours.signal, ours.trace) == pytest.approx(
                (theirs.noise, theirs.signal, theirs.trace), rel=1e-9
            )


LINE = plan_of(pipeline(4, 2, stage((0, 2), ((0,), 2)), stage((2, 4), ((1,), 2))))
BESIDE = (
    pipeline(2, 2, stage((0, 2), ((0,), 2)), stage((2, 4), ((1,), 2))),
    pipeline(2, 2, stage((0, 4), ((2,), 2))),
)
PARTIAL = (pipeline(2, 2, stage((0, 4), ((0, 1), 2))), pipeline(2, 2, stage((0, 4), ((2,), 2))))


def refused(plan, parts, reason, options):
    recipe = Recipe(optimizer=sgd, loss=mse, dtype=torch.float64, **options)
    with pytest.raises(UnsupportedPlanError, match=reason):
        Engine(plan, parts(plan), recipe, noise=True)


def net(_):
    return ModelParts.of(Net)


def tied(plan):
    return ModelParts.of(Case(plan).model)


def partial(plan):
    return ModelParts.of(TensorCase(plan, tied=False).model)


def one(_):
    return 1


@pytest.mark.parametrize(
    ("plan", "parts", "reason", "options"),
    [
        (LINE, net, "takes the gradient of one replica only", {}),
        (LINE, net, "only the last stage knows", {"num_items": one}),
        (plan_of(*BESIDE, sequence=4), tied, "is tied between stages of one pipeline", {}),
        (plan_of(*PARTIAL, sequence=4), partial, "several ranks each have a part of one group's", {}),
    ],
)
def test_groups_that_are_not_seen_apart_are_refused(plan, parts, reason, options):
    run_ranks(len(plan.devices), refused, plan, parts, reason, options)


def by_maker(plan):
    """As in an elastic job, whose plans follow from the devices that are there."""
    recipe, cpu = Recipe(optimizer=sgd, loss=mse, dtype=torch.float64), torch.device("cpu")
    hooks = Hooks(None, None, cpu, ExitStack())
    make = EngineMaker(
        parts=ModelParts.of(Net), recipe=recipe, device=cpu, hooks=hooks, overlap=True, noise=True,
        follows_plans=True,
    )  # fmt: skip
    engine = make(plan, dist.get_rank())
    found = engine.step(batch(0)).noise
    engine.close()
    return found is not None


@pytest.mark.parametrize(("plan", "is_seen"), [(LINE, False), (PLANS["unlike shares by stage"], True)])
def test_where_others_choose_the_plan_one_that_shows_no_noise_trains_without_a_reading(plan, is_seen):
    assert set(run_ranks(len(plan.devices), by_maker, plan)) == {is_seen}


def one_rank_measures():
    recipe = Recipe(optimizer=sgd, loss=mse, dtype=torch.float64)
    plan = PLANS["unlike shares by stage"]
    Engine(plan, ModelParts.of(Net), recipe, noise=dist.get_rank() == 0).step(batch(0))


def test_ranks_that_do_not_all_measure_are_told():
    with pytest.raises(WorkerFailedError, match=r"the engines of the ranks differ in .*noise"):
        run_ranks(4, one_rank_measures)
