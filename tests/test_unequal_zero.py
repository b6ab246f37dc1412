"""ZeRO-1 on what HeteroDDP sums: the same training as one process, with parts of the states on each rank."""

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


def train(kind: str, split: bool, clip: bool, alone: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    num_ranks = 1 if alone else torch.distributed.get_world_size()
    loader = arachne.HeteroLoader(data(), 5, sharing=Wild(num_ranks))
    model = arachne.HeteroDDP(net(), loader=loader)
    optimizer = make(kind, model)
    if split:
        optimizer = arachne.split_optimizer(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(2):
        for x, y in loader:
            with loader.step(optimizer, schedule):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                schedule.step()
    held = sum(v.numel() for v in optimizer._backend.kept()) if split else 0
    if split:
        optimizer.close()
    return values(model), held


@pytest.mark.parametrize(("kind", "num_ranks", "clip"), [("adam", 3, False), ("momentum", 2, True)])
def test_split_states_train_like_whole_ones(kind, num_ranks, clip):
    wanted, _ = train(kind, split=False, clip=clip, alone=True)
    unsplit = run_ranks(num_ranks, train, kind, False, clip)
    whole = sum(p.numel() for p in net().parameters() if p.requires_grad)
    for found, held in run_ranks(num_ranks, train, kind, True, clip):
        assert gap(found, wanted) < 1e-9
        assert gap(found, unsplit[0][0]) == 0
        kept = {"adam": 3, "momentum": 2}[kind] * whole
        assert held < kept / num_ranks + 60  # a part of each, padding, and the numbers of steps


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
