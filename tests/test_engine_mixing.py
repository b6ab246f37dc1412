"""A block whose result for a sample depends on the samples beside it would train otherwise under a plan."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import ModelError, UnsupportedPlanError, WorkerFailedError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from tests.models import GPT, next_token_loss


def plan_of(*stages, micro_batches):
    width = sum(stages[0].shares)
    pipeline = Pipeline(micro_batches=micro_batches, micro_batch=width, stages=stages)
    return Plan(model="tiny", global_batch=micro_batches * width, sequence=1, pipelines=(pipeline,))


def stage(layers, *devices, share, recompute=False):
    replicas = tuple(Replica(devices=(device,), share=share) for device in devices)
    return Stage(layers=layers, replicas=replicas, recompute=recompute)


WHOLE = plan_of(stage((0, 2), "a:0", share=8), micro_batches=1)
WHOLE_AGAIN = plan_of(stage((0, 2), "a:0", share=8, recompute=True), micro_batches=1)
PARTS = plan_of(stage((0, 2), "a:0", share=2), micro_batches=4)
ONES = plan_of(stage((0, 2), "a:0", share=1), micro_batches=8)
SIDE_BY_SIDE = plan_of(stage((0, 2), "a:0", "a:1", share=1), micro_batches=1)


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def engine(plan, *blocks, **changes):
    given = {"loss": mse, "dtype": torch.float64} | changes
    return Engine(
        plan,
        ModelParts.of(lambda: nn.Sequential(*(block() for block in blocks))),
        Recipe(**{"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | given),
    )


def batch(num_rows=8):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(num_rows, 4, generator=generator, dtype=torch.float64) for _ in range(2))


class Line(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


class Does(nn.Module):
    """Whatever function it is given; counts its calls."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, x):
        self.calls += 1
        return self.function(x)


class Attends(nn.Module):
    """Rows come first, but the attention is told that the sequence does."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1)

    def forward(self, x):
        x = x.view(len(x), 2, 2)
        return self.attention(x, x, x)[0].flatten(1)


class Gated(nn.Module):
    """Mixes nothing until its gate has learned."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.gate)

    def forward(self, x):
        return x + self.gate * x.mean(0)


MIXES = {
    "centres": lambda: Does(lambda x: x - x.mean(0)),
    "softmax over rows": lambda: Does(lambda x: x.softmax(0)),
    "statistics": lambda: Does(
        lambda x: F.batch_norm(torch.cat((x, x + 1)), None, None, training=True)[: len(x)]
    ),
    "one place only": lambda: Does(lambda x: torch.cat((x[:, :3], x[:, 3:].cumsum(0).flip(0)), 1)),
    "attention": Attends,
}


@pytest.mark.parametrize("plan", [PARTS, ONES], ids=["shares of 2", "shares of 1"])
@pytest.mark.parametrize("kind", MIXES)
def test_a_block_that_mixes_samples_is_refused_where_the_batch_is_split(kind, plan):
    with pytest.raises(UnsupportedPlanError, match=r"^block 1 \(\w+\) gives a sample another result"):
        engine(plan, Line, MIXES[kind]).step(batch())


@pytest.mark.parametrize("plan", [WHOLE, WHOLE_AGAIN])
def test_it_is_right_where_it_sees_the_whole_batch_and_may_be_waived(plan):
    assert engine(plan, Line, MIXES["centres"]).step(batch()).is_finite
    assert engine(PARTS, Line, MIXES["centres"], stochastic=True).step(batch()).is_finite


def test_what_mixes_only_after_the_first_step_is_found_in_the_second():
    found = engine(PARTS, Line, Gated)
    found.step(batch())
    with pytest.raises(UnsupportedPlanError, match=r"block 1 .*gives a sample another result"):
        found.step(batch())


class Counts(nn.Module):
    """Grows with every call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_a_block_that_counts_its_calls_is_told_as_that():
    assert engine(WHOLE, Line, Counts).step(batch()).is_finite
    with pytest.raises(UnsupportedPlanError, match=r"block 1 \(Counts\) .*when it is called again"):
        engine(PARTS, Line, Counts).step(batch())


def on_two_ranks(kind):
    return engine(SIDE_BY_SIDE, Line, MIXES.get(kind, Line)).step(batch(2)).loss


def test_one_row_a_rank_is_enough_to_see_it():
    assert len(set(run_ranks(2, on_two_ranks, "none"))) == 1
    with pytest.raises(WorkerFailedError, match=r"block 1 .*gives a sample another result"):
        run_ranks(2, on_two_ranks, "centres")


def second_stage(rank_of_fault):
    plan = plan_of(stage((0, 1), "a:0", share=2), stage((1, 2), "a:1", share=2), micro_batches=4)
    blocks = [Line, Line]
    blocks[rank_of_fault] = MIXES["centres"]
    return engine(plan, *blocks).step(batch()).loss


@pytest.mark.parametrize("block", [0, 1])
def test_each_stage_looks_at_its_own_blocks(block):
    with pytest.raises(WorkerFailedError, match=rf"block {block} \(Does\) gives a sample another result"):
        run_ranks(2, second_stage, block)


def test_tokens_and_their_context_are_looked_at():
    class Centring(nn.Embedding):
        def forward(self, tokens):
            x = super().forward(tokens)
            return x - x.mean(0)

    tokens = torch.randint(31, (4, 8), generator=torch.Generator().manual_seed(1))

    def trained(embedding):
        def model():
            found = GPT()
            found.embed = embedding(31, 16)
            return found

        plan = plan_of(stage((0, 5), "a:0", share=2), micro_batches=2)
        recipe = Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=next_token_loss)
        made = Engine(plan, ModelParts.of(model), recipe)
        return made.step(tokens).is_finite

    assert trained(nn.Embedding)
    with pytest.raises(UnsupportedPlanError, match=r"block 0 \(Centring\) gives"):
        trained(Centring)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_passes_for_no_fault(dtype):
    wide = [lambda: nn.Linear(256, 256), lambda: nn.LayerNorm(256)]
    plan = plan_of(stage((0, 2), "a:0", share=32), micro_batches=2)
    inputs = tuple(torch.randn(64, 256, dtype=dtype) for _ in range(2))
    assert engine(plan, *wide, dtype=dtype).step(inputs).is_finite


@pytest.mark.parametrize(
    "block",
    [
        lambda x: x.reshape(2, 4, 1).squeeze(-1),
        lambda x: F.relu_(x),
        lambda x: x * (1 / 0 if len(x) == 3 else 1),
        lambda x: torch.where(x > 9, float("nan"), x),
    ],
    ids=["only for two rows", "in place", "fails on three", "not finite"],
)
def test_a_block_that_keeps_samples_apart_is_left_alone(block):
    assert engine(PARTS, Line, lambda: Does(block)).step(batch()).is_finite


def test_rows_in_another_dim_inside_a_stage_are_left_alone():
    plan = plan_of(stage((0, 2), "a:0", share=3), micro_batches=2)
    swaps = lambda: Does(lambda x: x.t())  # noqa: E731
    assert engine(plan, swaps, swaps).step(batch(6)).is_finite


def test_it_costs_nothing_in_most_steps_and_leaves_the_random_state_alone():
    found = engine(PARTS, Line, lambda: Does(torch.sin))
    (counter,) = (m for m in found.stages[0].modules() if isinstance(m, Does))
    torch.manual_seed(7)
    drawn = torch.rand(())
    torch.manual_seed(7)
    calls = []
    for _ in range(8):
        found.step(batch())
        calls.append(counter.calls)
        counter.calls = 0
    assert torch.equal(torch.rand(()), drawn)
    assert [count for step, count in enumerate(calls) if step in (3, 5, 6, 7)] == [4] * 4
    assert all(count <= 6 for count in calls)


# --- losses of one row at a time


def sum_of_squares(output, batch):
    return (output - batch[1]).square().sum()


def in_batch_negatives(output, batch):
    return F.cross_entropy(output @ batch[1].T, torch.arange(len(output)))


def mean_over_tokens(output, batch):
    left_out = torch.where(batch[1] > batch[1].mean(1, keepdim=True), 1.0, 0.0)
    left_out[:, 1:] *= torch.where(batch[1][:, :1] > 0, 1.0, 0.0)
    return ((output - batch[1]).square() * left_out).sum() / left_out.sum().clamp(min=1)


@pytest.mark.parametrize("loss", [sum_of_squares, in_batch_negatives, mean_over_tokens])
def test_a_loss_that_is_no_mean_is_found_though_it_sees_one_row_at_a_time(loss):
    with pytest.raises(ModelError, match="is not the mean over its rows"):
        engine(ONES, Line, Line, loss=loss).step(batch())


def each_of_two(loss):
    found = engine(SIDE_BY_SIDE, Line, Line, loss=loss)
    rows = batch()
    return [found.step(tuple(t[2 * i : 2 * i + 2] for t in rows)).loss for i in range(3)]


def test_one_row_a_rank_and_step_is_enough_to_see_it():
    assert len(run_ranks(2, each_of_two, mse)) == 2
    with pytest.raises(WorkerFailedError, match="is not the mean over its rows"):
        run_ranks(2, each_of_two, mean_over_tokens)


def test_rows_of_two_lengths_are_not_laid_together():
    plan = plan_of(stage((0, 1), "a:0", share=1), micro_batches=2)
    shorter = lambda: Does(lambda x: x[:, : 2 if x[0, 0] > 0 else 3])  # noqa: E731
    found = engine(plan, shorter, loss=lambda output, batch: output.square().mean())
    rows = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)
    assert found.step((rows, rows)).is_finite
