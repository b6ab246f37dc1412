"""Adaptive batches on real ranks: alike everywhere, with the steps of one process; schedules keep pace."""

import json
import logging
import math
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import arachne_runtime as arachne
from arachne_runtime.batch import Balancer, ControllerSettings, ReplicaTime, TimeModel, gain
from arachne_runtime.data.order import GlobalOrder
from arachne_runtime.data_parallel.adaptive import Adaptation
from arachne_runtime.errors import UsageError
from arachne_runtime.plan.shares import Line
from arachne_runtime.testing import run_ranks
from tests.unequal import Wild

NUM, WIDTH, BASE, MOST, RATE = 240, 4, 8, 48, 0.01
SOON = ControllerSettings(review_steps=4, least_steps=4, memory_steps=10.0)
FLAT = TimeModel(
    replicas=(ReplicaTime(outside=Line(0.5, 1e-5), backward=Line(0.5, 1e-5)),) * 2,
    ready=(1.0,),
    reduce_s=(0.0,),
)
"""A step takes as long for many samples as for few, so that more noise pays more samples."""


class Told(Balancer):
    """Even shares; a time model that was told, not learnt, so that decisions do not hang on this machine."""

    def __init__(self) -> None:
        super().__init__(num_replicas=2)

    def observe(self, readings) -> None:
        pass

    def model(self) -> TimeModel:
        return FLAT


def data() -> TensorDataset:
    """A line with much noise: some ten samples until noise and signal are equal."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM, WIDTH, generator=generator, dtype=torch.float64)
    noise = 3 * torch.randn(NUM, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-1.0], [2.0], [0.5]], dtype=torch.float64) + noise)


def build() -> nn.Module:
    model = nn.Linear(WIDTH, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def decay(step: int) -> float:
    return 1 / (1 + 0.05 * step)


@dataclass(frozen=True)
class Taken:
    """One step."""

    epoch: int
    rows: int
    factor: float
    progress: float
    """Before it."""


def make_loader(**options):
    adaptive = arachne.AdaptiveBatch(most=MOST, settings=SOON, **options)
    return arachne.HeteroLoader(data(), BASE, sharing=Told(), adaptive=adaptive)


class Training:
    """A script of a user: an adaptive loader, an optimizer, a schedule, and a state of all of them."""

    def __init__(self, kind, **options) -> None:
        self.loader = make_loader(**options)
        self.model = arachne.HeteroDDP(build(), loader=self.loader)
        self.optimizer = kind(self.model.parameters(), RATE)
        self.schedule = LambdaLR(self.optimizer, decay)
        self.taken: list[Taken] = []
        self.samples: list[int] = []

    def epoch(self, epoch, *, fail_at=(), stop_at=None):
        rank = torch.distributed.get_rank()
        for batch in self.loader:
            rate = self.optimizer.param_groups[0]["lr"]
            with self.loader.step(self.optimizer, self.schedule):
                if (rank, len(self.taken)) in fail_at:
                    fail_at = ()
                    raise torch.OutOfMemoryError("by hand")
                (self.model(batch[0]) - batch[1]).square().mean().backward()
                self.optimizer.step()
                if not self.loader.link.failures:
                    assert self.optimizer.param_groups[0]["lr"] == rate
                    self.note(epoch)
                self.schedule.step()
                self.optimizer.zero_grad()
            if len(self.taken) == stop_at:
                return

    def note(self, epoch):
        rows, adaptation = sum(self.loader.shares), self.loader.adaptation
        self.taken.append(Taken(epoch, rows, adaptation.lr_factor, self.loader.progress))

    def found(self):
        weights = [p.tolist() for p in self.model.parameters()]
        return self.taken, weights, self.loader.adaptation.decisions, self.schedule.last_epoch


def alone(kind, taken):
    """The same steps in one process, by hand."""
    model, dataset = build(), data()
    optimizer = kind(model.parameters(), RATE)
    order, place, epoch = GlobalOrder(num_samples=NUM, global_batch=BASE), 0, 0
    for one in taken:
        place, epoch = (place if one.epoch == epoch else 0), one.epoch
        samples = order.at(epoch, range(place, place + one.rows))
        x, y = dataset[samples]
        place += one.rows
        optimizer.param_groups[0]["lr"] = RATE * decay(math.floor(one.progress)) * one.factor
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


def two_epochs(kind, fail_at, options):
    training = Training(kind, **options)
    for epoch in range(2):
        training.epoch(epoch, fail_at=fail_at if not epoch else ())
    return training.found()


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(a).double(), torch.tensor(b).double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "power"), [(torch.optim.SGD, 1.0), (torch.optim.Adam, 0.5)])
def test_it_grows_alike_on_all_ranks_and_takes_the_steps_of_one_process(kind, power):
    first, second = run_ranks(2, two_epochs, kind, ((1, 11),), {})
    assert first == second
    taken, weights, decisions, schedule_steps = first
    assert len(decisions) >= 2
    assert taken[0].rows == BASE < decisions[-1].batch <= MOST
    for epoch in range(2):
        assert sum(one.rows for one in taken if one.epoch == epoch) == NUM  # also of the step that failed
    assert_close(weights, alone(kind, taken))
    worth = [one.factor ** (1 / power) for one in taken]
    assert all(1 <= a <= max(one.rows / BASE, 1) + 1e-9 for a, one in zip(worth, taken, strict=True))
    assert any(a > 1.2 for a in worth)
    for one, gained, after in zip(taken, worth, taken[1:], strict=False):
        assert after.progress == pytest.approx(one.progress + gained)
    assert schedule_steps == math.floor(taken[-1].progress + worth[-1]) > len(taken)


def test_a_rule_by_name():
    (taken, *_), _ = run_ranks(2, two_epochs, torch.optim.SGD, (), {"scaling": "linear"})
    assert max(one.factor for one in taken) >= 2
    assert all(one.factor == max(one.rows, BASE) / BASE for one in taken)


def stopped(stop_at, state):
    training = Training(torch.optim.SGD)
    if state is not None:
        training.loader.load_state_dict(json.loads(state))
    first = training.loader.global_batch, training.loader.progress
    training.epoch(0, stop_at=stop_at)
    return json.dumps(training.loader.state_dict()), first, training.found()


def test_it_goes_on_at_the_exact_sample_with_its_batch_and_progress():
    (state, _, (before, *_)), _ = run_ranks(2, stopped, 10, None)
    (_, (batch, progress), (after, _, decisions, _)), again = run_ranks(2, stopped, None, state)
    assert again[2][0] == after
    assert sum(one.rows for one in (*before, *after)) == NUM
    assert batch == after[0].rows > BASE
    last = before[-1]
    assert progress == after[0].progress == pytest.approx(last.progress + last.factor, rel=1e-12)
    assert after[0].factor > 1.2  # the noise scale was not forgotten
    assert all(one.before >= batch for one in decisions[:1])


class Sleep(torch.autograd.Function):
    """Takes 3 ms forward and backward, however many rows."""

    @staticmethod
    def forward(ctx, x_BD):
        time.sleep(3e-3)
        return x_BD.clone()

    @staticmethod
    def backward(ctx, grad_BD):
        time.sleep(3e-3)
        return grad_BD


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), build()
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(WIDTH))

    def forward(self, x_BD):
        return self.last(Sleep.apply(self.first(x_BD)))


def by_readings():
    """Nothing is told: the time model is learnt from the reducer's readings."""
    torch.manual_seed(0)
    adaptive = arachne.AdaptiveBatch(most=MOST, settings=SOON)
    loader = arachne.HeteroLoader(data(), BASE, adaptive=adaptive)
    model = arachne.HeteroDDP(Slow(), loader=loader)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.5)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("arachne_runtime")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        for x, y in loader:
            with loader.step(optimizer):
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return loader.adaptation.decisions, records


def test_times_are_learnt_and_the_first_rank_logs_why():
    (decisions, told), (others, silent) = run_ranks(2, by_readings)
    assert decisions == others
    assert decisions[0].batch > BASE
    assert told == [str(one) for one in decisions]
    assert silent == []


def test_a_short_step_counts_as_what_it_has_or_as_one_of_the_base_batch():
    adaptation = Adaptation(arachne.AdaptiveBatch(scaling="linear", least=2), base_batch=8, num_samples=100)
    for rows, batch, factor in ((64, 64, 8), (20, 64, 2.5), (3, 64, 1), (3, 8, 1), (1, 4, 0.5)):
        adaptation.begin(rows, batch)
        assert adaptation.lr_factor == factor
        adaptation.summed()
        before = adaptation.controller.progress.steps
        assert adaptation.state.progress_steps == before + gain(
            round(8 * factor), base_batch=8, noise_scale=math.inf
        )


def without_the_third_line(model, loader):
    for x, y in loader:
        (model(x) - y).square().mean().backward()


def refused():
    loader = make_loader()
    model = arachne.HeteroDDP(build(), loader=loader)
    with pytest.raises(UsageError, match=r"inside `with loader.step\(optimizer\):`"):
        without_the_third_line(model, loader)
    loader = make_loader()
    model = arachne.HeteroDDP(build(), loader=loader)
    with pytest.raises(UsageError, match="not added up by no_sync"), model.no_sync():
        pass
    with pytest.raises(UsageError, match="the batch is adaptive; bound it"):
        loader.global_batch = 3
    pair = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters(), 0.1)]
    next(iter(loader))
    with pytest.raises(UsageError, match="name one rule for both"), loader.step(*pair):
        pass
    with pytest.raises(UsageError, match="shares that learn how long a step takes"):
        arachne.HeteroLoader(data(), BASE, sharing=Wild(2), adaptive=arachne.AdaptiveBatch())
    plain = arachne.HeteroLoader(data(), BASE)
    with pytest.raises(UsageError, match="a loader whose batch was adaptive"):
        plain.load_state_dict(make_loader().state_dict())
    with pytest.raises(UsageError, match="make it with adaptive="):
        _ = plain.progress
    twice = [arachne.HeteroLoader(data(), BASE, adaptive=arachne.AdaptiveBatch()) for _ in range(2)]
    with pytest.raises(UsageError, match="another loader with adaptive="):
        next(iter(twice[0]))


def test_what_would_be_silently_wrong_is_refused():
    run_ranks(2, refused)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="no scaling rule named 'cubic'; known: adamscale, adascale, linear"):
        arachne.AdaptiveBatch(scaling="cubic")
    with pytest.raises(UsageError, match="least ≤ base_batch ≤ most"):
        arachne.AdaptiveBatch(most=4).controller(base_batch=8, num_samples=100)


def shares_of_others(state):
    loader = arachne.HeteroLoader(data(), BASE)
    if torch.distributed.get_rank() == 0:
        with pytest.warns(UserWarning, match="the speeds of 2 ranks, now there are 3"):
            loader.load_state_dict(state)
    else:
        loader.load_state_dict(state)
    return loader.state_dict()["position"]


def told_shares():
    loader = arachne.HeteroLoader(data(), BASE)
    model = arachne.HeteroDDP(build(), loader=loader)
    for step, (x, y) in enumerate(loader):
        (model(x) - y).square().mean().backward()
        if step == 12:
            state = loader.state_dict()
            other = arachne.HeteroLoader(data(), BASE)
            arachne.HeteroDDP(build(), loader=other)  # takes it for itself, with shares of its own
            other.load_state_dict(json.loads(json.dumps(state)))
            assert other.link.sharing is not loader.link.sharing
            assert other.link.sharing.state == loader.link.sharing.state
            assert other.link.sharing.model() == loader.link.sharing.model()
            return state
    raise AssertionError


def test_shares_that_were_learnt_are_in_the_state_for_as_many_ranks():
    state = run_ranks(2, told_shares)[0]
    assert run_ranks(3, shares_of_others, state) == [state["position"]] * 3
