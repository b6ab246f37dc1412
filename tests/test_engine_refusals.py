"""What the engine refuses before the first step, with the way out."""

from dataclasses import replace

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import ModelError, NonFiniteGradientError, UnsupportedPlanError, UsageError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.runnable import refuse_unrunnable

ALONE = Plan(
    model="tiny",
    global_batch=8,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=2,
            micro_batch=4,
            stages=(Stage(layers=(0, 2), replicas=(Replica(devices=("a:0",), share=4),)),),
        ),
    ),
)


def with_stage(**changes):
    pipeline = ALONE.pipelines[0]
    stage = msgspec.structs.replace(pipeline.stages[0], **changes)
    return msgspec.structs.replace(ALONE, pipelines=(msgspec.structs.replace(pipeline, stages=(stage,)),))


def with_pipeline(**changes):
    return msgspec.structs.replace(ALONE, pipelines=(msgspec.structs.replace(ALONE.pipelines[0], **changes),))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def engine(plan=ALONE, model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), **changes):
    given = {"optimizer": sgd, "loss": mse} | changes
    return Engine(plan, ModelParts.of(model), Recipe(**given))


def batch(num_rows=8):
    return torch.randn(num_rows, 3), torch.randn(num_rows, 3)


TWO_REPLICAS = (Replica(devices=("a:0",), share=2), Replica(devices=("a:1",), share=2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"replicas": (Replica(devices=("a:0", "a:1"), share=4),)},
            "is tensor-parallel over 2 devices, but the model does not say how its modules are shared out",
        ),
        (
            {"replicas": TWO_REPLICAS, "expert_parallel": 2},
            "expert_parallel 2 and expert_tensor 1, but blocks 0 to 1 hold no",
        ),
        (
            {"replicas": TWO_REPLICAS, "expert_tensor": 2},
            "expert_parallel 1 and expert_tensor 2, but blocks 0 to 1 hold no",
        ),
    ],
)
def test_what_two_devices_would_share_is_refused(monkeypatch, changes, told):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedPlanError, match=told):
        engine(with_stage(**changes))


def test_another_number_of_ranks_is_refused():
    plan = with_stage(replicas=(Replica(devices=("a:0",), share=2), Replica(devices=("a:1",), share=2)))
    with pytest.raises(UsageError, match="the plan uses 2 devices, but there are 1 ranks"):
        engine(plan)


def test_another_number_of_blocks_is_refused():
    with pytest.raises(UsageError, match="the plan cuts 2 blocks, but the model has 3"):
        engine(model=lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))))


@pytest.mark.parametrize("num_rows", [0, 9])
def test_a_batch_that_the_plan_cannot_split_is_refused(num_rows):
    with pytest.raises(UsageError, match=f"a batch of {num_rows} rows; the plan's global_batch is 8"):
        engine().step(batch(num_rows))


def test_batch_norm_is_refused_where_it_would_see_a_part_of_the_batch():
    def model():
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    with pytest.raises(UnsupportedPlanError, match=r"block 1: .*BatchNorm1d in training.*use LayerNorm"):
        engine(model=model)
    stage = Stage(layers=(0, 2), replicas=(Replica(devices=("a:0",), share=8),))
    whole = with_pipeline(micro_batches=1, micro_batch=8, stages=(stage,))
    assert engine(whole, model).step(batch()).is_finite
    assert engine(model=lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()))


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.RReLU(), nn.MultiheadAttention(4, 2, dropout=0.5)])
def test_modules_that_draw_random_numbers_are_refused(module):
    with pytest.raises(UnsupportedPlanError, match=r"block 1: .*draws random numbers.*stochastic=True"):
        engine(model=lambda: nn.Sequential(nn.Linear(3, 3), type(module)(*_arguments(module))))


def _arguments(module):
    return (4, 2, 0.5) if isinstance(module, nn.MultiheadAttention) else ()


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_random_numbers_that_no_module_announces_are_found_in_the_first_step():
    found = engine(model=lambda: nn.Sequential(nn.Linear(3, 3), Noise()))
    with pytest.raises(UnsupportedPlanError, match="a forward drew random numbers") as caught:
        found.step(batch())
    assert caught.value.__notes__ == ["rank 0 (a:0), stage 0 of pipeline 0, at 0F0, in step 0"]


def test_a_block_that_fails_is_named_with_what_it_was_called_with():
    found = engine(model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 3)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        found.step(batch())
    assert caught.value.__notes__[0] == "in block 1 (Linear), called with (4, 3) float32"


def test_stochastic_waives_the_invariance():
    model = lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))  # noqa: E731
    assert engine(model=model, stochastic=True).step(batch()).is_finite
    assert engine(with_stage(recompute=True), model, stochastic=True).step(batch()).is_finite


def test_zero_dropout_is_fine():
    assert engine(model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))).step(batch()).is_finite


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(UsageError, match=r"LBFGS\.step needs a closure"):
        engine(optimizer=lambda p: torch.optim.LBFGS(p))


@pytest.mark.parametrize("made", [None, [1]])
def test_a_function_that_returns_no_optimizer_is_refused(made):
    with pytest.raises(UsageError, match=rf"returned {type(made).__name__}, not a torch.*return"):
        engine(optimizer=lambda p: made)


@pytest.mark.parametrize(
    ("argument", "value", "told"),
    [
        (
            "optimizer",
            torch.optim.SGD([torch.zeros(1)], lr=1.0),
            r"optimizer=a SGD is no function; give .*: lambda p: torch\.optim\.AdamW",
        ),
        ("loss", None, "loss=null is no function; give the mean over its samples"),
        ("loss", nn.Linear(3, 1), r"loss=Linear has parameters of its own \(weight, bias\)"),
        ("num_items", 5, "num_items=5 is no function"),
        ("clip_norm", "1.0", "clip_norm='1.0' is no norm; give a number above 0"),
        ("clip_norm", 0, "clip_norm=0 is no norm"),
        ("clip_norm", float("nan"), "clip_norm=nan is no norm"),
        ("seed", "7", "seed='7' is no whole number"),
        ("dtype", "float64", "dtype='float64' is no dtype of torch"),
    ],
)
def test_arguments_that_would_fail_in_the_middle_of_a_step_are_refused_at_once(argument, value, told):
    with pytest.raises(UsageError, match=told):
        engine(**{argument: value})


def test_a_loss_of_many_numbers_is_refused():
    with pytest.raises(ModelError, match=r"must return one number.*shape \(4, 3\)"):
        engine(loss=lambda output, batch: output - batch[1]).step(batch())


def test_a_loss_without_gradients_is_refused():
    with pytest.raises(ModelError, match=r"does not depend on the output by gradients.*leave \.detach"):
        engine(loss=lambda output, batch: mse(output, batch).detach()).step(batch())
    frozen = lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)  # noqa: E731
    assert engine(model=frozen).step(batch()).grad_norm == 0


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(off):
    found = engine()
    with off(), pytest.raises(UsageError, match=r"a step trains, but gradients are off here"):
        found.step(batch())


def test_a_mean_over_no_items_is_refused():
    with pytest.raises(UsageError, match="num_items counts 0 items"):
        engine(num_items=lambda batch: 0).step(batch())


def test_gradients_that_are_not_finite_are_refused_and_change_no_parameter():
    found = engine(loss=lambda output, batch: output.sum() * float("nan"))
    before = [p.detach().clone() for _, p in found.named_parameters()]
    with pytest.raises(NonFiniteGradientError, match=r"blocks\.1\.bias is not finite.*the loss is nan"):
        found.step(batch())
    assert all(torch.equal(p, old) for (_, p), old in zip(found.named_parameters(), before, strict=True))


def test_a_norm_that_overflows_is_no_fault_of_the_gradients():
    found = engine(loss=lambda output, batch: output.mean() * 1e30)
    assert found.step(batch()).grad_norm == float("inf")


def test_sparse_gradients_are_refused():
    found = engine(model=lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)))
    with pytest.raises(ModelError, match=r"shape \(5, 3\) has a sparse gradient.*sparse=False"):
        found.step((torch.ones(8, dtype=torch.long), torch.randn(8, 3)))


def test_the_first_fault_does_not_hide_the_others():
    with pytest.raises(UnsupportedPlanError) as caught:
        refuse_unrunnable(with_stage(zero=3, expert_parallel=2, recompute=True, replicas=TWO_REPLICAS))
    said = str(caught.value)
    assert "experts shared out" in said
    assert "with recompute" in said


def test_a_stage_without_parameters_trains():
    found = engine(model=lambda: nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert found.optimizer is None
    assert found.step(batch()).grad_norm == 0
    assert replace(found.step(batch()), seconds=0).step == 1
