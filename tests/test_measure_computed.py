"""What a rank computes in a step, apart from its waits for others."""

import time

import torch
import torch.distributed as dist
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.measure.computed import Computed
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

SLOW_S = 0.2
PLAN = Plan(
    model="tiny",
    global_batch=2,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=1,
            micro_batch=2,
            stages=tuple(
                Stage(layers=(i, i + 1), replicas=(Replica(devices=(f"a:{i}",), share=2),)) for i in range(2)
            ),
        ),
    ),
)


class Slow(nn.Linear):
    """It takes its time."""

    def forward(self, x):
        time.sleep(SLOW_S)
        return super().forward(x)


def computed_and_step():
    """Of step 3, in which nothing is run twice."""
    sums = Computed()
    parts = ModelParts.of(lambda: nn.Sequential(nn.Linear(3, 3), Slow(3, 3)))
    recipe = Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, x: y.square().mean())
    engine = Engine(PLAN, parts, recipe, recorder=sums)
    reports = [engine.step(torch.ones(2, 3)) for _ in range(4)]
    engine.close()
    return dist.get_rank(), sums.seconds, reports[-1].seconds


def test_the_wait_for_a_slow_stage_is_not_counted():
    (_, first_s, step_s), (_, slow_s, _) = run_ranks(2, computed_and_step)
    assert step_s >= SLOW_S
    assert slow_s >= SLOW_S
    assert 0 < first_s < step_s - 0.9 * SLOW_S
