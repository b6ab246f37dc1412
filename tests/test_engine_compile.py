"""Compiled blocks: the same results, one compilation for blocks of one kind, and none for what only looks."""

import pytest
import torch
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.compiled import compile_blocks, refuse_compiled
from arachne_runtime.errors import UnsupportedPlanError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks
from tests.models import GPT, next_token_loss


def stage(layers, *shares, start, **options):
    replicas = tuple(Replica(devices=(f"a:{start + i}",), share=share) for i, share in enumerate(shares))
    return Stage(layers=layers, replicas=replicas, **options)


def plan_of(*stages, micro_batches=2, schedule=ScheduleKind.ONE_F_ONE_B):
    rows = sum(stages[0].shares)
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=rows, stages=stages)
    return Plan(
        model="tiny", global_batch=rows * micro_batches, sequence=8, schedule=schedule, pipelines=(pipeline,)
    )


ALONE = plan_of(stage((0, 5), 4, start=0))
SPLIT = plan_of(stage((0, 2), 4, start=0), stage((2, 5), 3, 1, start=1, recompute=True))


def tokens(step, num_rows=8):
    return torch.randint(31, (num_rows, 8), generator=torch.Generator().manual_seed(step))


def engine_of(plan, compiled, **options):
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=next_token_loss,
        compile=compiled,
        seed=1,
        **options,
    )
    return Engine(plan, ModelParts.of(GPT), recipe)


def trains(plan, compiled):
    engine = engine_of(plan, compiled)
    losses = [engine.step(tokens(step, num_rows)).loss for step, num_rows in enumerate((8, 5))]
    losses.append(engine.evaluate([tokens(9)]).loss)
    names = [name for stage in engine.stages for name in stage.state_dict()]
    values = {name: p.detach().clone() for name, p in engine.named_parameters()}
    engine.close()
    return losses, names, values


def test_compiled_blocks_train_as_others_do():
    plain, compiled = (run_ranks(3, trains, SPLIT, c) for c in (False, "aot_eager"))
    for (losses, names, values), (wanted, wanted_names, wanted_values) in zip(compiled, plain, strict=True):
        assert names == wanted_names
        assert losses == pytest.approx(wanted, rel=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted_values[name], rtol=1e-4, atol=1e-6)


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sin(self.linear(x)) * x


def by_inductor(compiled):
    plan = plan_of(stage((0, 2), 4, start=0), micro_batches=1)
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, x: y.square().mean(), compile=compiled
    )
    engine = Engine(plan, ModelParts.of(lambda: nn.Sequential(Wave(), Wave())), recipe)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    return [engine.step(x).loss for _ in range(3)]


def test_torchs_own_compiler_gives_the_same_losses():
    assert run_ranks(1, by_inductor, True)[0] == pytest.approx(run_ranks(1, by_inductor, False)[0], rel=1e-6)


def compilations():
    """Shapes of the first inputs of what a backend is given."""
    seen = []

    def counting(graph, inputs):
        seen.append(next(tuple(t.shape) for t in inputs if isinstance(t, torch.Tensor)))
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    engine = engine_of(ALONE, "counting")
    engine.step(tokens(0))
    engine.step(tokens(1))
    return seen


def test_blocks_of_one_kind_are_compiled_once():
    """Three layers, of which the engine also runs two rows to look whether they mix samples."""
    (seen,) = run_ranks(1, compilations)
    assert seen == [(4, 8, 16)]


def test_a_schedule_that_splits_a_backward_is_refused():
    plan = plan_of(stage((0, 5), 4, start=0), schedule=ScheduleKind.ZERO_BUBBLE)
    with pytest.raises(UnsupportedPlanError, match="a compiled block computes them with the rest"):
        engine_of(plan, True)


def test_the_modules_of_a_block_of_many_are_compiled_each():
    parts = ModelParts.of(GPT)
    stage = parts.stage(range(5), device=torch.device("cpu"), seed=0)
    compile_blocks(stage, "eager")
    compiled = [type(m) for m in stage.modules() if m._compiled_call_impl is not None]
    assert [kind.__name__ for kind in compiled] == ["Embedding", *["Layer"] * 3, "LayerNorm", "Linear"]
    assert isinstance(stage, nn.Module)


def test_a_block_that_is_shared_out_over_devices_is_refused():
    shared = Stage(layers=(0, 5), replicas=(Replica(devices=("a:0", "a:1"), share=4),))
    with pytest.raises(UnsupportedPlanError, match=r"stages\[0\] shares its blocks out.*leave compile= out"):
        refuse_compiled(plan_of(shared), "inductor")
    refuse_compiled(plan_of(shared), None)


class Pulls(nn.Module):
    """Adds a loss of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        arachne.add_loss(y.square().mean())
        return torch.tanh(y)


def pulled(compiled):
    plan = plan_of(stage((0, 2), 4, start=0, recompute=True))
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, x: y.square().mean(), compile=compiled
    )
    engine = Engine(plan, ModelParts.of(lambda: nn.Sequential(Pulls(), Pulls())), recipe)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    reports = [engine.step(x) for _ in range(3)]
    return [(report.loss, report.grad_norm) for report in reports]


def test_losses_that_compiled_blocks_add_are_kept():
    found, wanted = (run_ranks(1, pulled, compiled)[0] for compiled in ("aot_eager", False))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=0)
