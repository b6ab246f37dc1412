"""What would train otherwise than one process does, without a word, is found while the engine runs."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from arachne_runtime.data import GlobalOrder, LoaderSettings, load_steps
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import ModelError, UnsupportedPlanError, UsageError, WorkerFailedError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks


def plan_of(*stages, micro_batches=4):
    width = stages[0].replicas[0].share * len(stages[0].replicas)
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=width, stages=stages)
    return Plan(model="tiny", global_batch=micro_batches * width, sequence=1, pipelines=(pipeline,))


def stage(layers, *devices, share=2, recompute=False):
    replicas = tuple(Replica(devices=(device,), share=share) for device in devices)
    return Stage(layers=layers, replicas=replicas, recompute=recompute)


WHOLE = plan_of(stage((0, 2), "a:0", share=8), micro_batches=1)
PARTS = plan_of(stage((0, 2), "a:0"))
AGAIN = plan_of(stage((0, 2), "a:0", recompute=True))
TWO = plan_of(stage((0, 1), "a:0"), stage((1, 2), "a:1"))


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def engine(plan, *blocks, **changes):
    given = {"loss": mse, "dtype": torch.float64} | changes
    return Engine(
        plan,
        ModelParts.of(lambda: nn.Sequential(*(block() for block in blocks))),
        Recipe(**{"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | given),
    )


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(8, 3, generator=generator, dtype=torch.float64) for _ in range(2))


class Line(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)


def sum_of_squares(output, batch):
    return (output - batch[1]).square().sum()


def in_batch_negatives(output, batch):
    return F.cross_entropy(output @ batch[1].T, torch.arange(len(output)))


def mean_over_tokens(output, batch):
    targets = torch.arange(len(output)) % 3
    targets[1:] = torch.where(batch[1][1:, 0] > 0, -100, targets[1:])
    tokens = torch.stack((torch.zeros_like(targets), targets), 1)
    return F.cross_entropy(torch.stack((output, output), 1).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("loss", [sum_of_squares, in_batch_negatives, mean_over_tokens])
def test_a_loss_that_is_no_mean_over_its_rows_is_refused_where_rows_are_apart(loss):
    assert engine(WHOLE, Line, Line, loss=loss).step(batch()).is_finite
    with pytest.raises(ModelError, match=r"is not the mean over its rows: .* num_items="):
        engine(PARTS, Line, Line, loss=loss).step(batch())
    assert engine(PARTS, Line, Line, loss=loss, stochastic=True).step(batch()).is_finite


def test_a_mean_is_refused_where_items_are_counted():
    assert engine(PARTS, Line, Line, loss=sum_of_squares, num_items=lambda b: len(b[0])).step(batch())
    with pytest.raises(ModelError, match="is not the sum over its rows"):
        engine(PARTS, Line, Line, num_items=lambda b: len(b[0])).step(batch())


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 4096), (torch.bfloat16, 64)])
def test_rounding_passes_for_no_fault(dtype, rows):
    plan = plan_of(stage((0, 2), "a:0", share=rows), micro_batches=2)
    inputs = tuple(torch.randn(2 * rows, 3, dtype=dtype) for _ in range(2))
    assert engine(plan, Line, Line, dtype=dtype).step(inputs).is_finite


def test_a_loss_that_takes_only_whole_micro_batches_is_left_alone():
    loss = lambda output, batch: F.mse_loss(output.view(2, 3), batch[1])  # noqa: E731
    assert engine(PARTS, Line, Line, loss=loss).step(batch()).is_finite


@pytest.mark.parametrize("items", [2.5, torch.tensor(0.5), -1])
def test_items_that_are_no_whole_number_are_refused(items):
    with pytest.raises(UsageError, match=r"num_items\(batch\) gave .*: a whole number"):
        engine(PARTS, Line, Line, loss=sum_of_squares, num_items=lambda batch: items).step(batch())


class Average(nn.Module):
    """Keeps a moving average of what it has seen."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3), persistent=persistent)

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x


class InPlace(Average):
    def forward(self, x):
        self.seen += x.detach().mean(0)
        return x


@pytest.mark.parametrize("kind", [Average, InPlace])
def test_a_buffer_that_a_forward_changes_is_refused_where_the_batch_is_split_or_run_again(kind):
    assert engine(WHOLE, Line, kind).step(batch()).is_finite
    once_again = plan_of(stage((0, 2), "a:0", share=8, recompute=True), micro_batches=1)
    for plan in (PARTS, once_again):
        with pytest.raises(UnsupportedPlanError, match=r"changes the buffer blocks\.1\.seen"):
            engine(plan, Line, kind).step(batch())
    assert engine(PARTS, Line, lambda: kind(persistent=False)).step(batch()).is_finite


def test_batch_norm_that_would_be_recomputed_is_refused():
    plan = plan_of(stage((0, 2), "a:0", share=8, recompute=True), micro_batches=1)
    with pytest.raises(UnsupportedPlanError, match=r"BatchNorm1d in training.*no recomputation"):
        engine(plan, Line, lambda: nn.BatchNorm1d(3))


def steps(found):
    for _ in range(4):
        found.step(batch())


class Noise(nn.Module):
    """Draws, from its ``start``-th call on."""

    def __init__(self, draw, start=0):
        super().__init__()
        self.draw, self.start, self.calls = draw, start, 0

    def forward(self, x):
        self.calls += 1
        return x * self.draw() if self.calls > self.start else x


@pytest.mark.parametrize(
    "noise",
    [
        lambda: Noise(random.random),
        lambda: Noise(lambda: __import__("numpy").random.rand()),
        lambda: Noise(lambda: torch.rand(()), start=8),
    ],
)
def test_random_numbers_of_python_and_numpy_and_of_later_steps_are_found(noise):
    found = engine(PARTS, Line, noise)
    with pytest.raises(UnsupportedPlanError, match="drew random numbers"):
        steps(found)


class Adds(nn.Module):
    """Changes its input in place, otherwise each time."""

    def forward(self, x):
        return (x.add_(1)).square()


def copied(batch):
    return (batch[0].clone(),)


def test_a_recomputed_stage_begins_where_it_began_though_a_block_changes_its_input():
    given = batch()
    reports = [engine(plan, Adds, Line, inputs=copied).step(given) for plan in (WHOLE, PARTS, AGAIN)]
    for report in reports[1:]:
        assert abs(report.loss - reports[0].loss) < 1e-12
        assert abs(report.grad_norm - reports[0].grad_norm) < 1e-12


def reconstruction(output, batch):
    return F.mse_loss(output, batch[0])


def changes_its_batch(plan, copies):
    found = engine(plan, Adds, Line, loss=reconstruction, **({"inputs": copied} if copies else {}))
    return found.step(batch()).loss


def test_a_batch_that_is_changed_in_place_is_refused_where_the_loss_would_not_see_it():
    """The loss compares with the inputs, on another rank or after a recomputation: it saw the old values."""
    told = "block 0 or one behind it changes the batch in place"
    with pytest.raises(ModelError, match=told):
        changes_its_batch(AGAIN, copies=False)
    with pytest.raises(WorkerFailedError, match=told):
        run_ranks(2, changes_its_batch, TWO, False)
    alone = changes_its_batch(WHOLE, copies=True)
    assert all(abs(loss - alone) < 1e-12 for loss in run_ranks(2, changes_its_batch, TWO, True))
    assert changes_its_batch(WHOLE, copies=False) != alone


def clamped(parameter):
    parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def taken(parameter):
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


@pytest.mark.parametrize("hook", [clamped, taken])
def test_a_hook_on_a_gradient_is_refused_where_it_would_see_a_part(hook):
    for plan in (PARTS, WHOLE):
        found = engine(plan, Line, Line)
        hook(found.stages[0].blocks["0"].weight)
        if plan is WHOLE:
            found.step(batch())
            continue
        with pytest.raises(
            UsageError, match=r"shape \(3, 3\) has a hook on its gradient, which would be called"
        ):
            found.step(batch())


def test_a_parameter_that_is_thawed_after_the_engine_was_made_is_refused():
    frozen = lambda: Line().requires_grad_(False)  # noqa: E731
    found = engine(PARTS, frozen, Line)
    found.step(batch())
    found.stages[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"shape \(3, 3\) was frozen when the engine was made"):
        found.step(batch())


def with_adapter(found):
    found.stages[0].blocks["1"].adapter = Line()


def with_another_weight(found):
    found.stages[0].blocks["1"].weight = nn.Parameter(torch.zeros(3, 3))


def with_less(found):
    del found.stages[0].blocks["1"].bias


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_adapter, r"blocks\.1\.adapter\.weight was put into the stage"),
        (with_another_weight, r"blocks\.1\.weight was put into the stage"),
        (with_less, "1 were taken out of the stage"),
    ],
)
def test_parameters_that_change_after_the_engine_was_made_are_refused(change, told):
    found = engine(PARTS, Line, Line)
    found.step(batch())
    change(found)
    with pytest.raises(UsageError, match=rf"changed after the engine was made \({told}\).*adapters too"):
        found.step(batch())


class Masked(Line):
    def __init__(self):
        super().__init__()
        self.weight.register_hook(lambda gradient: gradient * 0)


def test_a_hook_on_a_gradient_is_refused_since_it_would_be_lost():
    with pytest.raises(ModelError, match=r"parameter 0\.weight has a hook on its gradient"):
        engine(WHOLE, Masked, Line)


def differing(what):
    rank = dist.get_rank()
    found = engine(TWO, Line, Line, seed=rank if what == "seed" else 0)
    given = batch(rank if what == "batch" else 0)
    if what == "order":
        numbers = torch.utils.data.TensorDataset(*given)
        order = GlobalOrder(num_samples=8, global_batch=8, seed=rank)
        (given,) = load_steps(numbers, order, range(1), found.needed_rows, LoaderSettings())
    return found.step(given).loss


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("seed", "the engines of the ranks differ in plan, model, seed"),
        ("batch", "the ranks have different samples"),
        ("order", "the ranks have different samples"),
    ],
)
def test_ranks_that_were_given_different_things_are_told(what, told):
    with pytest.raises(WorkerFailedError, match=told):
        run_ranks(2, differing, what)


def test_ranks_that_were_given_the_same_train():
    first, second = run_ranks(2, differing, "nothing")
    assert first == second


class Twice(Line):
    """One tensor and a view of it."""

    def forward(self, x):
        y = super().forward(x)
        return y, y[:, :2]


class Joins(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, a, b):
        a = a.add_(1) if self.in_place else a + 1
        return a + F.pad(b, (0, 1))


def crossing(plan, in_place):
    return engine(plan, Twice, lambda: Joins(in_place)).step(batch()).loss


@pytest.mark.parametrize("recompute", [False, True])
def test_a_change_in_place_of_what_shared_memory_across_a_boundary_is_refused(recompute):
    plan = plan_of(stage((0, 1), "a:0"), stage((1, 2), "a:1", recompute=recompute))
    alone = run_ranks(1, crossing, PARTS, False)
    assert abs(run_ranks(2, crossing, plan, False)[0] - alone[0]) < 1e-12
    with pytest.raises(WorkerFailedError, match="shared memory with another output of block 0"):
        run_ranks(2, crossing, plan, True)
