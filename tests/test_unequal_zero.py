"""ZeRO-1 on what HeteroDDP sums: the same training as one process, with parts of the states on each rank."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import arachne_runtime as arachne
from arachne_runtime.errors import UnsupportedPlanError, UsageError
from arachne_runtime.testing import run_ranks
from tests.unequal import Net, Wild, data, gap, values

pytest.importorskip("deepspeed")


def make(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    first, rest = [*model.parameters()][:2], [*model.parameters()][2:]
    groups = [{"params": first, "lr": 0.02}, {"params": rest}]
    if kind == "momentum":
        return torch.optim.SGD(groups, 0.1, momentum=0.9)
    return torch.optim.AdamW(groups, 0.01)


def net() -> torch.nn.Module:
    torch.manual_seed(7)
    model = Net().double()
    model.never.requires_grad_(False)
    return model


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str = "adam"
    split: bool = True
    alone: bool = False
    clip: bool = False
    epochs: tuple[int, ...] = (0, 1)
    start: Any = None
    """What a training of earlier epochs has left."""


@dataclass(frozen=True)
class Trained:
    values: dict[str, torch.Tensor]
    states: dict[str, Any]
    schedule: dict[str, Any]
    num_held: int
    """Elements of the states and copies on this rank."""


def train(case: Case) -> Trained:
    num_ranks = 1 if case.alone else torch.distributed.get_world_size()
    loader = arachne.HeteroLoader(data(), 5, sharing=Wild(num_ranks))
    model = arachne.HeteroDDP(net(), loader=loader)
    optimizer = make(case.kind, model)
    if case.split:
        optimizer = arachne.split_optimizer(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if case.start:
        model.module.load_state_dict(case.start.values)
        optimizer.load_state_dict(case.start.states)
        schedule.load_state_dict(case.start.schedule)
    for epoch in case.epochs:
        loader.set_epoch(epoch)
        for x, y in loader:
            with loader.step(optimizer, schedule):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                if case.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                schedule.step()
    if not case.split:
        return Trained(values(model), optimizer.state_dict(), schedule.state_dict(), 0)
    num_held = sum(v.numel() for v in optimizer._backend.kept())
    states = optimizer.whole_state_dict()
    optimizer.close()
    return Trained(values(model), states, schedule.state_dict(), num_held)


@pytest.mark.parametrize(("num_ranks", "case"), [(3, Case()), (2, Case(kind="momentum", clip=True))])
def test_split_states_train_like_whole_ones(num_ranks, case):
    alone = train(replace(case, split=False, alone=True))
    (whole, *_) = run_ranks(num_ranks, train, replace(case, split=False))
    num_elements = sum(p.numel() for p in net().parameters() if p.requires_grad)
    for found in run_ranks(num_ranks, train, case):
        assert gap(found.values, alone.values) < 1e-9
        assert gap(found.values, whole.values) == 0
        kept = {"adam": 3, "momentum": 2}[case.kind] * num_elements
        assert found.num_held < kept / num_ranks + 60  # a part of each, padding, and the numbers of steps


@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_it_goes_on_from_states_whether_whole_or_split(kind):
    case = Case(kind=kind)
    straight = train(replace(case, split=False, alone=True))
    (half, *_) = run_ranks(3, train, replace(case, epochs=(0,)))
    (found, *_) = run_ranks(2, train, replace(case, epochs=(1,), start=half))
    assert gap(found.values, straight.values) < 1e-9
    alone = train(replace(case, epochs=(1,), start=half, split=False, alone=True))
    assert gap(alone.values, straight.values) < 1e-9
    assert found.states["state"].keys() == straight.states["state"].keys()


def move_after_the_split() -> str:
    model = arachne.HeteroDDP(net(), loader=arachne.HeteroLoader(data(), 5))
    optimizer = arachne.split_optimizer(model, make("adam", model))
    model.module.first.weight.data = model.module.first.weight.data.clone()
    try:
        optimizer.step()
    except UsageError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_a_model_that_was_moved_is_refused():
    assert all("first.weight is in other memory" in text for text in run_ranks(2, move_after_the_split))


def step_without_a_number() -> bool:
    loader = arachne.HeteroLoader(data(), 5)
    model = arachne.HeteroDDP(net(), loader=loader)
    optimizer = arachne.split_optimizer(model, make("adam", model))
    for x, _ in loader:
        (model(x).sum() * float("nan")).backward()
        optimizer.step()
        break
    optimizer.close()
    return all(bool(p.isnan().all()) for p in model.parameters() if p.requires_grad)


def test_a_gradient_that_is_no_number_is_taken_as_torch_takes_it():
    assert all(run_ranks(2, step_without_a_number))


def test_what_is_not_exact_is_refused():
    model = arachne.HeteroDDP(net())
    for zero in (0, 2, 3):
        with pytest.raises(UnsupportedPlanError, match="only the states can be split"):
            arachne.split_optimizer(model, make("adam", model), zero=zero)
    with pytest.raises(UsageError, match="not the model's"):
        arachne.split_optimizer(model, make("adam", net()))


def ask_for_states() -> str:
    model = arachne.HeteroDDP(net(), loader=arachne.HeteroLoader(data(), 5))
    optimizer = arachne.split_optimizer(model, make("adam", model))
    try:
        optimizer.state_dict()
    except UsageError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_states_in_parts_are_not_saved_as_if_they_were_whole():
    assert all("in parts" in text for text in run_ranks(2, ask_for_states))


def measure_in_parts(kind: str) -> str:
    model = arachne.HeteroDDP(net(), loader=arachne.HeteroLoader(data(), 5))
    optimizer = arachne.split_optimizer(model, make(kind, model))
    try:
        model.measure_noise(optimizer)
    except UsageError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_noise_is_not_measured_in_the_space_of_an_adam_in_parts():
    assert all("a part of Adam's means of squares" in text for text in run_ranks(2, measure_in_parts, "adam"))
    assert run_ranks(2, measure_in_parts, "momentum") == ["", ""]
