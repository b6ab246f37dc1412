"""Evaluation over the stages of a plan: the loss of one process in eval mode, and nothing is trained."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import UsageError, WorkerFailedError
from arachne_runtime.mesh import GlooTransport
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.limits import PENDING_SENDS
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks

WIDTH, IGNORED = 3, -100.0


class Block(nn.Module):
    """A linear map with a dropout, which eval mode turns off, and a part that is in eval mode always."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.fixed = nn.BatchNorm1d(WIDTH).eval()

    def forward(self, x):
        return torch.tanh(self.fixed(self.drop(self.linear(x))))


def model():
    return nn.Sequential(*(Block() for _ in range(4)))


def stage(layers, *shares, start, **options):
    replicas = tuple(Replica(devices=(f"a:{start + i}",), share=share) for i, share in enumerate(shares))
    return Stage(layers=layers, replicas=replicas, **options)


ALONE = Plan(
    model="tiny",
    global_batch=10,
    sequence=1,
    pipelines=(Pipeline(micro_batches=1, micro_batch=10, stages=(stage((0, 4), 10, start=0),)),),
)
UNLIKE = Plan(
    model="tiny",
    global_batch=10,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=3,
            micro_batch=2,
            stages=(stage((0, 1), 1, 1, start=0), stage((1, 4), 2, start=2, recompute=True)),
        ),
        Pipeline(micro_batches=1, micro_batch=4, stages=(stage((0, 4), 4, start=3),)),
    ),
)
"""Two unlike pipelines on four ranks."""


def mse(output, batch):
    return F.mse_loss(output, batch[1])


def summed(output, batch):
    return ((output - batch[1]).square() * (batch[1] != IGNORED)).sum()


def count(batch):
    return int((batch[1] != IGNORED).sum())


def engine_of(plan, by_items=False):
    recipe = Recipe(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        loss=summed if by_items else mse,
        num_items=count if by_items else None,
        dtype=torch.float64,
        stochastic=True,
        seed=2,
    )
    return Engine(plan, ModelParts.of(model), recipe)


def batch(number, num_rows):
    random = torch.Generator().manual_seed(number)
    x, y = (torch.randn(num_rows, WIDTH, generator=random).double() for _ in range(2))
    if number % 3 == 1:
        y[: num_rows // 2] = IGNORED
    if number % 3 == 2:
        y[:] = IGNORED
    return x, y


def evaluates(plan, sizes, by_items):
    engine = engine_of(plan, by_items)
    modes = [m.training for s in engine.stages for m in s.modules()]
    before = [p.detach().clone() for _, p in engine.named_parameters()]
    report = engine.evaluate(batch(number, size) for number, size in enumerate(sizes))
    assert [m.training for s in engine.stages for m in s.modules()] == modes
    assert not all(modes)
    after = list(engine.named_parameters())
    assert all(torch.equal(p, old) and p.grad is None for (_, p), old in zip(after, before, strict=True))
    engine.close()
    return report.loss, report.num_samples, report.num_items, report.num_batches


@pytest.mark.parametrize("by_items", [False, True])
@pytest.mark.parametrize("sizes", [(10,), (10, 10, 10, 3), (10, 1, 0), (2, 7, 4, 10)])
def test_the_loss_is_that_of_one_process_over_all_samples(sizes, by_items):
    whole = ModelParts.of(model).whole(seed=2, dtype=torch.float64).eval()
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(len(sizes)), sizes), strict=True))
    items = count((x, y)) if by_items else len(x)
    wanted = summed(whole(x), (x, y)) / items if by_items else mse(whole(x), (x, y))
    for loss, *counts in run_ranks(4, evaluates, UNLIKE, sizes, by_items):
        assert loss == pytest.approx(wanted.item(), rel=1e-12)
        assert counts == [sum(sizes), items, sum(size > 0 for size in sizes)]


def between_steps(plan, evaluate):
    engine = engine_of(plan)
    for part in engine.stages:
        part.eval()  # the blocks of this test draw in training
    losses = [engine.step(batch(0, 10)).loss]
    if evaluate:
        engine.evaluate([batch(3, 10), batch(4, 6)])
    return [*losses, engine.step(batch(0, 10)).loss]


def test_training_goes_on_as_if_nothing_was_evaluated():
    assert run_ranks(4, between_steps, UNLIKE, True) == run_ranks(4, between_steps, UNLIKE, False)


def pending(num_rows):
    chain = Pipeline(
        micro_batches=num_rows, micro_batch=1, stages=(stage((0, 2), 1, start=0), stage((2, 4), 1, start=1))
    )
    engine = engine_of(Plan(model="tiny", global_batch=num_rows, sequence=1, pipelines=(chain,)))
    under_way, most, send = [], [], GlooTransport.send

    def watch(self, tensor, receiver, tag):
        work = send(self, tensor, receiver, tag)
        under_way.append(work)
        wait = work.wait

        class Watched:
            def wait(self, *args):
                under_way.remove(work)
                return wait(*args)

        most.append(len(under_way))
        return Watched()

    GlooTransport.send = watch
    try:
        engine.evaluate([batch(0, num_rows)])
    finally:
        GlooTransport.send = send
    return max(most, default=0)


def test_outputs_that_have_arrived_are_let_go():
    sender, _ = run_ranks(2, pending, 24)
    assert sender <= PENDING_SENDS + 2  # a header, and the one that was just sent


def test_an_evaluation_of_nothing_is_refused():
    for nothing in ([], [batch(0, 0)]):
        with pytest.raises(UsageError, match="an evaluation of 0 samples has no items"):
            engine_of(ALONE).evaluate(nothing)
    with pytest.raises(UsageError, match="a batch of 11 rows; the plan's global_batch is 10"):
        engine_of(ALONE).evaluate([batch(0, 11)])


def other_batches(sizes):
    replicated = Plan(
        model="tiny",
        global_batch=10,
        sequence=1,
        pipelines=(Pipeline(micro_batches=5, micro_batch=2, stages=(stage((0, 4), 1, 1, start=0),)),),
    )
    engine = engine_of(replicated)
    mine = sizes[torch.distributed.get_rank()]
    engine.evaluate([batch(0, size) for size in mine])


@pytest.mark.parametrize("sizes", [((10, 4), (10,)), ((10,), (9,))])
def test_ranks_that_evaluate_other_batches_are_told(sizes):
    with pytest.raises(WorkerFailedError, match="give all the same batches"):
        run_ranks(2, other_batches, sizes)


def with_session(samples):
    with arachne.Session(UNLIKE, device="cpu") as session:
        engine = session.engine(
            model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=mse, stochastic=True, seed=2
        )
        report = engine.evaluate(session.batches(list(zip(*samples, strict=True)), 10, shuffle=False))
        return report.loss, report.num_batches


def test_a_session_gives_the_batches_of_an_evaluation():
    samples = tuple(part.float() for part in batch(0, 23))
    whole = ModelParts.of(model).whole(seed=2).eval()
    for loss, num_batches in run_ranks(4, with_session, samples):
        assert loss == pytest.approx(mse(whole(samples[0]), samples).item(), rel=1e-5)
        assert num_batches == 3


def interleaved(kind):
    stages = tuple(stage((i, i + 1), 2, start=i % 2) for i in range(4))
    pipeline = Pipeline(micro_batches=5, micro_batch=2, stages=stages)
    return Plan(model="tiny", global_batch=10, sequence=1, schedule=kind, pipelines=(pipeline,))


def test_a_rank_with_several_stages_evaluates():
    plan = interleaved(ScheduleKind.INTERLEAVED)
    (alone,) = run_ranks(1, evaluates, ALONE, (10, 3), False)
    for found in run_ranks(2, evaluates, plan, (10, 3), False):
        assert found[0] == pytest.approx(alone[0], rel=1e-12)
