"""A script of accelerate with HeteroAccelerator and random shares trains like one process."""

import math
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import arachne_runtime as arachne
from arachne_runtime.data.order import GlobalOrder
from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.testing import run_ranks
from tests.adapters import ACCUMULATE, as_torchrun_starts, mean_loss, net, train_alone, wild
from tests.test_unequal_adaptive import Training, alone, assert_close
from tests.unequal import ROWS, data, gap, values

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


def forget_states() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train() -> tuple[dict[str, Tensor], str, list[int]]:
    from arachne_runtime.adapters.accelerate import HeteroAccelerator

    with as_torchrun_starts():
        accelerator = HeteroAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        loader = wild(arachne.HeteroLoader(data(), 5))
        inner = net()
        optimizer = torch.optim.AdamW(inner.parameters(), 0.01)
        model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
        gathered = []
        for _ in range(2):
            for x, y in loader:
                gathered += accelerator.gather_for_metrics({"y": y})["y"].tolist()
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    optimizer.zero_grad()
        assert accelerator.unwrap_model(model) is inner
        kind = type(model).__name__
        assert type(accelerator.prepare(arachne.HeteroDDP(net()))).__name__ == "HeteroDDP"
        batches = iter(loader)
        next(batches)
        with pytest.raises(UsageError, match="rows of the batch"):
            accelerator.gather_for_metrics(torch.ones(ROWS))
        forget_states()
    return values(inner), kind, gathered


@needs_accelerate
def test_it_trains_like_one_process():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    # five batches an epoch: the last update of each takes one batch only, and accelerate divides it by two
    train_alone(
        model, optimizer, data(), mean_loss, global_batch=5, epochs=2, accumulate=ACCUMULATE, clip=0.3
    )
    order = GlobalOrder(num_samples=ROWS, global_batch=5)
    for found, kind, gathered in run_ranks(3, train):
        assert kind == "HeteroDDP"
        assert gathered == [int(data()[i][1]) for epoch in (0, 1) for i in order.at(epoch, range(ROWS))]
        assert gap(found, values(model)) < 1e-9


def prepare_wrongly() -> list[str]:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from arachne_runtime.adapters.accelerate import HeteroAccelerator

    told = []
    with as_torchrun_starts():
        hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        accelerator = HeteroAccelerator(cpu=True, kwargs_handlers=[hook])
        loader = arachne.HeteroLoader(data(), 5, process_group=lone_group())
        for what in (net(), loader):
            try:
                accelerator.prepare(what)
            except UsageError as error:
                told.append(str(error))
        forget_states()
    return told


def lone_group() -> Any:
    groups = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    return groups[torch.distributed.get_rank()]


@needs_accelerate
def test_what_is_not_exact_is_refused():
    for hook, early in run_ranks(2, prepare_wrongly):
        assert "does not rest" in hook
        assert "make it after the accelerator" in early


class Prepared(Training):
    """The same script under accelerate; its schedule is stepped once a step, not once for each process."""

    def __init__(self) -> None:
        from arachne_runtime.adapters.accelerate import HeteroAccelerator

        super().__init__(torch.optim.Adam)
        accelerator = HeteroAccelerator(cpu=True, step_scheduler_with_optimizer=False)
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(
            self.model, self.optimizer, self.schedule, self.loader
        )

    def found(self) -> Any:
        weights = [p.tolist() for p in self.model.parameters()]
        return self.taken, weights, self.loader.adaptation.decisions, self.schedule.scheduler.last_epoch


def train_adaptively() -> Any:
    with as_torchrun_starts():
        training = Prepared()
        training.epoch(0, fail_at=((1, 11),))
        training.epoch(1)
        found = training.found()
        training.optimizer.scaler = object()  # as mixed_precision="fp16" makes one on a GPU
        with pytest.raises(UsageError, match="fp16"):
            training.loader.step(training.optimizer)
        forget_states()
    return found


@needs_accelerate
def test_an_adaptive_batch_knows_the_users_own_optimizer():
    """A failed step is taken again, the rule is Adam's, and the schedule keeps pace."""
    first, second = run_ranks(2, train_adaptively)
    assert first == second
    taken, weights, decisions, schedule_steps = first
    assert decisions
    assert any(one.factor > 1.05 for one in taken)
    assert_close(weights, alone(torch.optim.Adam, taken))
    assert schedule_steps == math.floor(taken[-1].progress + taken[-1].factor ** 2)


def test_without_accelerate_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "arachne_runtime.adapters.accelerate", raising=False)
    with pytest.raises(UnsupportedEnvironmentError, match=r"arachne-hetero\[huggingface\]"):
        import arachne_runtime.adapters.accelerate  # noqa: F401
