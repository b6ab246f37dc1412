"""Frozen parameters, as with LoRA: exact, and they cost no gradient, no state, no sum and no backward hop."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import UsageError
from arachne_runtime.mesh import GlooTransport
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

WIDTH, ROWS, STEPS = 6, 8, 3


class Adapted(nn.Module):
    """A frozen linear map, and beside it an adapter of rank 2 that trains (or none)."""

    def __init__(self, adapter: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False) if adapter else None
        self.up = nn.Linear(2, WIDTH, bias=False) if adapter else None

    def forward(self, x):
        y = self.base(x)
        return torch.tanh(y + self.up(self.down(x)) if self.up is not None else y)


def model(adapters: str) -> nn.Sequential:
    """One block a letter: ``a`` has an adapter, ``f`` is frozen whole."""
    return nn.Sequential(*(Adapted(letter == "a") for letter in adapters))


def stage(layers, *shares, start, **options):
    replicas = tuple(Replica(devices=(f"a:{start + i}",), share=share) for i, share in enumerate(shares))
    return Stage(layers=layers, replicas=replicas, **options)


def plan_of(*stages):
    pipeline = Pipeline(micro_batches=4, micro_batch=sum(stages[0].shares), stages=stages)
    return Plan(model="tiny", global_batch=4 * sum(stages[0].shares), sequence=1, pipelines=(pipeline,))


THREE = plan_of(stage((0, 2), 2, start=0), stage((2, 4), 2, start=1), stage((4, 6), 2, start=2))
WIDE = plan_of(
    stage((0, 2), 2, start=0),
    stage((2, 4), 1, 1, start=1, recompute=True),
    stage((4, 6), 2, start=3, recompute=True),
)


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batch(step):
    torch.manual_seed(step)
    return torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()


def engine_of(plan, adapters):
    recipe = Recipe(optimizer=adam, loss=mse, dtype=torch.float64, clip_norm=0.1, seed=3)
    return Engine(plan, ModelParts.of(lambda: model(adapters)), recipe)


def train(plan, adapters):
    engine = engine_of(plan, adapters)
    reports = [engine.step(batch(step)) for step in range(STEPS)]
    values = {name: p.detach().clone() for name, p in engine.named_parameters()}
    held = [p for group in engine.optimizer.param_groups for p in group["params"]] if engine.optimizer else []
    states = len(engine.optimizer.state) if engine.optimizer else 0
    engine.close()
    return [(r.loss, r.grad_norm) for r in reports], values, (len(held), states)


def train_plainly(adapters):
    whole = ModelParts.of(lambda: model(adapters)).whole(seed=3, dtype=torch.float64)
    trainable = [p for p in whole.parameters() if p.requires_grad]
    optimizer, told = adam(trainable), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mse(whole(batch(step)[0]), batch(step))
        loss.backward()
        told.append((loss.item(), torch.nn.utils.clip_grad_norm_(trainable, 0.1).item()))
        optimizer.step()
    return told, {f"blocks.{name}": p.detach() for name, p in whole.named_parameters()}


@pytest.mark.parametrize("plan", [THREE, WIDE], ids=["three", "wide"])
@pytest.mark.parametrize("adapters", ["aaaaaa", "ffaaaa", "aaffaa", "aaaaff", "ffffaa", "faafff"])
def test_frozen_blocks_and_stages_train_as_in_one_process(plan, adapters):
    told, values = train_plainly(adapters)
    for reports, found, (held, states) in run_ranks(len(plan.devices), train, plan, adapters):
        torch.testing.assert_close(torch.tensor(reports), torch.tensor(told), rtol=0, atol=1e-12)
        for name, value in found.items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=1e-12)
        assert held == states == sum("down" in name or "up" in name for name in found)


def costs(plan, adapters):
    """Values sent by hops and sums, and products of a step, on this rank."""
    engine, sent, summed = engine_of(plan, adapters), [], []
    engine.step(batch(0))
    send, reduce = GlooTransport.send, dist.all_reduce

    def watch_send(self, tensor, receiver, tag):
        sent.append(receiver)
        return send(self, tensor, receiver, tag)

    def watch_reduce(tensor, *args, group=None, **kwargs):
        summed.append(tensor.numel() if group is not None else 0)  # the commit word has none
        return reduce(tensor, *args, group=group, **kwargs)

    GlooTransport.send, dist.all_reduce = watch_send, watch_reduce
    try:
        for _ in range(3):  # steps 1 and 2 look at blocks once more
            sent.clear()
            summed.clear()
            with FlopCounterMode(display=False) as flops:
                engine.step(batch(0))
    finally:
        GlooTransport.send, dist.all_reduce = send, reduce
    return sorted(sent), sum(summed), flops.get_total_flops()


def test_nothing_goes_back_below_the_lowest_block_that_trains():
    found = run_ranks(3, costs, THREE, "ffffaa")
    assert [sent for sent, _, _ in found] == [[1] * 5, [2] * 5, []]  # a header and four outputs each
    found = run_ranks(3, costs, THREE, "ffaaaa")
    assert [sent for sent, _, _ in found] == [[1] * 5, [2] * 5, [1] * 5]


def test_a_frozen_stage_computes_no_gradient_of_weights():
    once = 2 * 2 * ROWS * WIDTH * WIDTH  # two linear maps over all rows
    flops = [counted for _, _, counted in run_ranks(3, costs, THREE, "ffffaa")]
    assert flops[:2] == [once, once]
    flops = [counted for _, _, counted in run_ranks(3, costs, THREE, "faffff")]
    assert flops[1:] == [2 * once, 2 * once]  # forward, and the gradient that goes down


def test_frozen_parameters_are_not_summed():
    replicated = plan_of(stage((0, 6), 1, 1, start=0))
    frozen = 3
    summed = [count for _, count, _ in run_ranks(2, costs, replicated, "afafaf")]
    adapters = (6 - frozen) * 2 * 2 * WIDTH
    assert summed == [adapters + 2 * (6 - frozen)] * 2  # and a count for each parameter
    assert [count for _, count, _ in run_ranks(2, costs, replicated, "ffffff")] == [0, 0]


def thawed_later():
    engine = engine_of(plan_of(stage((0, 6), 2, start=0)), "aaaaaf")
    engine.stages[0].blocks["5"].base.weight.requires_grad_(True)
    engine.step(batch(0))


def test_a_parameter_that_is_thawed_later_is_refused():
    with pytest.raises(UsageError, match="was frozen when the engine was made"):
        thawed_later()


def frozen_later(plan):
    engine = engine_of(plan, "aaaaaa")
    for name, parameter in engine.named_parameters():
        parameter.requires_grad_("blocks.5" in name and "base" not in name)
    report = engine.step(batch(0))
    return report.loss, report.grad_norm


def test_parameters_may_be_frozen_later():
    alone, *_ = run_ranks(1, frozen_later, plan_of(stage((0, 6), 2, start=0)))
    for found in run_ranks(3, frozen_later, THREE):
        assert found == pytest.approx(alone, rel=1e-12)
