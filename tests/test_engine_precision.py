"""bf16, fp16 with one loss scale, gradients added in float32: as one process under the same autocast."""

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.engine.precision import FIRST_SCALE, LossScale, Precision
from arachne_runtime.errors import NonFiniteGradientError, UsageError, WorkerFailedError
from arachne_runtime.mesh import GlooTransport
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from tests.models import GPT, next_token_loss

ROWS, STEPS = 10, 3
FIRST_LOSS_TOLERANCE = 2e-6
"""Relative; a forward rounds each sample alike, however the batch is cut. Measured: 1e-7 (float32: 5e-5)."""
LOSS_TOLERANCE = 1e-3
"""Of the steps behind it. Measured: 3.4e-4 in bfloat16, 2.4e-5 in float16."""
GRADIENT_TOLERANCE = {Precision.BF16: 0.005, Precision.FP16: 0.001}
"""Of the norm of a gradient, whose products are rounded a micro-batch. Measured: 0.0022 and 0.00033."""


def stage(layers, *shares, start, **options):
    replicas = tuple(Replica(devices=(f"a:{start + i}",), share=share) for i, share in enumerate(shares))
    return Stage(layers=layers, replicas=replicas, **options)


def plan_of(*pipelines):
    rows = sum(p.micro_batches * p.micro_batch for p in pipelines)
    return Plan(model="tiny", global_batch=rows, sequence=8, pipelines=pipelines)


UNLIKE = plan_of(
    Pipeline(
        micro_batches=3,
        micro_batch=2,
        stages=(stage((0, 2), 2, start=0, recompute=True), stage((2, 5), 1, 1, start=1)),
    ),
    Pipeline(micro_batches=1, micro_batch=4, stages=(stage((0, 5), 4, start=3, recompute=True),)),
)


def gpt():
    return GPT(width=32, tied=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def tokens(step):
    return torch.randint(31, (ROWS, 8), generator=torch.Generator().manual_seed(step))


def trains(precision):
    recipe = Recipe(optimizer=sgd, loss=next_token_loss, precision=precision, clip_norm=1.0, seed=4)
    engine = Engine(UNLIKE, ModelParts.of(gpt), recipe)
    reports = [engine.step(tokens(0))]
    gradients = {name: p.grad.clone() for name, p in engine.named_parameters()}
    dtypes = {t.dtype for _, p in engine.named_parameters() for t in (p, p.grad)}
    reports += [engine.step(tokens(step)) for step in range(1, STEPS)]
    evaluated = engine.evaluate([tokens(9)]).loss
    engine.close()
    return [r.loss for r in reports], [r.skipped for r in reports], gradients, dtypes, evaluated


def train_plainly(precision):
    model = ModelParts.of(gpt).whole(seed=4)
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=precision.dtype):
            loss = next_token_loss(model(tokens(step)), tokens(step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad(), torch.autocast("cpu", dtype=precision.dtype):
        return losses, gradients, next_token_loss(model(tokens(9)), tokens(9)).item()


NAMES = {"embed": "blocks.0", "layers.0": "blocks.1", "layers.1": "blocks.2", "layers.2": "blocks.3"}


def global_name(name):
    place = next((p for p in NAMES if name.startswith(p)), None)
    return NAMES[place] + name[len(place) :] if place else f"blocks.4.{name}"


@pytest.mark.parametrize("precision", list(Precision))
def test_training_equals_one_process_under_the_same_autocast(precision):
    wanted, gradients, evaluated = train_plainly(precision)
    gradients = {global_name(name): gradient for name, gradient in gradients.items()}
    for losses, skipped, found, dtypes, loss in run_ranks(4, trains, precision):
        assert losses[0] == pytest.approx(wanted[0], rel=FIRST_LOSS_TOLERANCE)
        assert losses == pytest.approx(wanted, rel=LOSS_TOLERANCE)
        assert loss == pytest.approx(evaluated, rel=LOSS_TOLERANCE)
        assert (skipped, dtypes) == ([False] * STEPS, {torch.float32})
        for name, gradient in found.items():
            apart = (gradient - gradients[name]).norm() / gradients[name].norm()
            assert apart < GRADIENT_TOLERANCE[precision], name


class Line(nn.Module):
    """A linear map; ``spoil`` multiplies a gradient that passes it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.spoil = 1.0

    def forward(self, x):
        y = self.linear(x)
        if self.spoil != 1.0 and y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.spoil)
        return y


CHAIN = plan_of(
    Pipeline(
        micro_batches=2,
        micro_batch=2,
        stages=(stage((0, 1), 2, start=0), stage((1, 2), 1, 1, start=1), stage((2, 3), 2, start=3)),
    )
)


def lines(**options):
    given = {"optimizer": sgd, "loss": lambda y, batch: F.mse_loss(y, batch[1])} | options
    return Engine(CHAIN, ModelParts.of(lambda: nn.Sequential(*(Line() for _ in range(3)))), Recipe(**given))


def batch():
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 3, generator=random) for _ in range(2))


def dtypes_of_messages(precision):
    engine, seen, send = lines(precision=precision), set(), GlooTransport.send

    def watch(self, tensor, receiver, tag):
        seen.add(tensor.dtype)
        return send(self, tensor, receiver, tag)

    GlooTransport.send = watch
    try:
        engine.step(batch())
    finally:
        GlooTransport.send = send
    return seen - {torch.int64, torch.uint8}  # headers, and notes of which gradients are there


@pytest.mark.parametrize("precision", [*Precision, None])
def test_messages_have_the_dtype_of_the_activations(precision):
    for seen in run_ranks(4, dtypes_of_messages, precision):
        assert seen == {precision.dtype if precision else torch.float32}


def halves(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def overflows(spoiled_step):
    engine = lines(precision=Precision.FP16, lr_schedule=halves, clip_norm=0.5)
    reports, kept, rates = [], [], []
    for step in range(4):
        before = [p.detach().clone() for _, p in engine.named_parameters()]
        spoiled = dist.get_rank() == 2 and step == spoiled_step
        engine.stages[0].blocks[str(engine.stages[0].block_range[0])].spoil = 1e9 if spoiled else 1.0
        reports.append(engine.step(batch()))
        after = [p for _, p in engine.named_parameters()]
        kept.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        rates.append(engine.schedule.get_last_lr()[0])
    return [(r.skipped, r.loss_scale, math.isfinite(r.grad_norm)) for r in reports], kept, rates


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale():
    for told, kept, rates in run_ranks(4, overflows, 1):
        assert told[0] == (False, FIRST_SCALE, True)
        assert told[1] == (True, FIRST_SCALE, False)
        assert told[2:] == [(False, FIRST_SCALE / 2, True)] * 2
        assert kept == [False, True, False, False]
        assert rates == [0.25, 0.25, 0.125, 0.0625]


def same_without_scale(scale):
    engine = lines(precision=Precision.FP16, clip_norm=0.1)
    engine.scale.value = scale
    report = engine.step(batch())
    return report.loss, report.grad_norm, [p.grad.clone() for _, p in engine.named_parameters()]


def test_the_scale_is_in_no_result():
    for small, large in zip(
        run_ranks(4, same_without_scale, 8.0), run_ranks(4, same_without_scale, 512.0), strict=True
    ):
        assert small[:2] == pytest.approx(large[:2], rel=2e-3)
        for a, b in zip(small[2], large[2], strict=True):
            torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_scale_follows_torchs_rule(seed):
    random = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer, theirs = torch.optim.SGD([parameter], lr=0.0), torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale(growth_steps=3)
    for number in torch.rand(40, generator=random):
        finite = bool(number < 0.8)
        theirs.scale(parameter.sum()).backward()
        parameter.grad.fill_(1.0 if finite else math.inf)
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite=finite)
        assert ours.value == theirs.get_scale()


def test_the_defaults_are_torchs():
    theirs, ours = torch.amp.GradScaler("cpu"), LossScale()
    assert (ours.value, ours.growth_steps) == (65536.0, theirs.get_growth_interval())
    assert (theirs.get_growth_factor(), theirs.get_backoff_factor()) == (2.0, 0.5)


def lost():
    engine = lines(precision=Precision.FP16)
    engine.stages[0].blocks[str(engine.stages[0].block_range[0])].spoil = math.nan
    for _ in range(100):
        engine.step(batch())


def test_gradients_that_overflow_at_any_scale_end_the_training():
    with pytest.raises(WorkerFailedError, match=r"NonFiniteGradientError: .*blocks\.2") as caught:
        run_ranks(4, lost)
    assert "in step 31" in str(caught.value)  # 2^16 down to below 2^-14


def spoils(rank, spoil):
    engine = lines(clip_norm=1.0, lr_schedule=halves)
    before = [p.detach().clone() for _, p in engine.named_parameters()]
    if dist.get_rank() == rank:
        engine.stages[0].blocks[str(engine.stages[0].block_range[0])].spoil = spoil
    try:
        engine.step(batch())
    except NonFiniteGradientError as error:
        after = [p for _, p in engine.named_parameters()]
        return str(error), all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return "", False


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("rank", "told"), [(2, r"block 1, on rank 1 \(a:1, .*2 \(a:2, "), (3, r"block 2, on rank 3 ")]
)
def test_a_gradient_that_is_not_finite_is_told_on_all_ranks_and_changes_nothing(rank, told, spoil):
    found = run_ranks(4, spoils, rank, spoil)
    assert len({error for error, _ in found}) == 1
    assert all(kept for _, kept in found)
    assert re.search(told, found[0][0])
    assert "the loss is" not in found[0][0]


REPLICATED = plan_of(Pipeline(micro_batches=32, micro_batch=2, stages=(stage((0, 2), 1, 1, start=0),)))


def small():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def many():
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(64, 3, generator=random).bfloat16() for _ in range(2))


def mse(y, samples):
    return F.mse_loss(y, samples[1])


def adds(accumulate):
    recipe = Recipe(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        loss=mse,
        dtype=torch.bfloat16,
        accumulate=accumulate,
    )
    engine = Engine(REPLICATED, ModelParts.of(small), recipe)
    for _ in range(2):
        start = [p.detach().clone() for _, p in engine.named_parameters()]
        engine.step(many())
    return start, [p.grad for _, p in engine.named_parameters()]


def row_by_row(start):
    """Gradients of each row in bfloat16, added in float32."""
    model = small().to(torch.bfloat16)
    for parameter, value in zip(model.parameters(), start, strict=True):
        parameter.data.copy_(value)
    total = [torch.zeros(p.shape) for p in model.parameters()]
    x, y = many()
    for row in range(64):
        loss = mse(model(x[row : row + 1]), (x, y[row : row + 1])).float() / 64
        for gradient, whole in zip(torch.autograd.grad(loss, list(model.parameters())), total, strict=True):
            whole += gradient
    return total


def test_gradients_of_16_bits_are_added_in_float32_and_rounded_once():
    for start, found in run_ranks(2, adds, torch.float32):
        for gradient, whole in zip(found, row_by_row(start), strict=True):
            assert gradient.dtype is torch.bfloat16
            torch.testing.assert_close(gradient, whole.bfloat16(), rtol=2**-8, atol=0)
    for start, found in run_ranks(2, adds, None):
        apart = [(g.float() - w).norm() / w.norm() for g, w in zip(found, row_by_row(start), strict=True)]
        assert max(apart) > 2**-8


def single_dtype():
    engine = lines(accumulate=torch.float32)
    engine.step(batch())
    return {p.grad.dtype for _, p in engine.named_parameters()}


def test_accumulating_leaves_float32_parameters_alone():
    assert run_ranks(4, single_dtype) == [{torch.float32}] * 4


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"precision='fp8' is none of bf16, fp16"):
        Precision.of("fp8")
    for options, told in (
        (
            {"precision": Precision.BF16, "dtype": torch.bfloat16},
            r"precision='bf16' keeps parameters in float32",
        ),
        ({"precision": "bf16"}, r"precision='bf16' is no Precision"),
        (
            {"accumulate": torch.bfloat16},
            r"accumulate=.*is no dtype to add gradients in; give torch\.float32",
        ),
        (
            {"compile": "gcc"},
            r"compile='gcc' is no compiler of torch; use True \(inductor\), or one of [a-z_, ]+$",
        ),
    ):
        with pytest.raises(UsageError, match=told):
            Recipe(optimizer=sgd, loss=mse, **options)
    alone = plan_of(Pipeline(micro_batches=1, micro_batch=2, stages=(stage((0, 2), 2, start=0),)))
    recipe = Recipe(optimizer=sgd, loss=mse, precision=Precision.FP16)
    with pytest.raises(UsageError, match=r"but blocks\.0\.weight is torch\.bfloat16"):
        Engine(alone, ModelParts.of(lambda: small().to(torch.bfloat16)), recipe)


ALONE = plan_of(Pipeline(micro_batches=5, micro_batch=2, stages=(stage((0, 5), 2, start=0),)))


def under_autocast(once):
    """Losses of steps behind an evaluation, all inside one autocast or each inside its own."""
    recipe = Recipe(optimizer=sgd, loss=next_token_loss)
    engine, losses = Engine(ALONE, ModelParts.of(gpt), recipe), []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=once):
        for step in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(engine.evaluate([tokens(step)]).loss)
                losses.append(engine.step(tokens(step)).loss)
    engine.close()
    return losses


def test_a_callers_autocast_around_the_loop_does_not_keep_old_parameters():
    assert under_autocast(once=True) == under_autocast(once=False)
