"""What users of DistributedDataParallel expect of HeteroDDP, and what it refuses."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import arachne_runtime as arachne
from arachne_runtime.batch import Group, SegmentNorms, measure_noise
from arachne_runtime.errors import UsageError
from arachne_runtime.testing import run_ranks
from tests.unequal import Case, Net, Wild, build, data, penalised


def like_ddp():
    """Without a loader: the gradients, states and values of DistributedDataParallel."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    ours, theirs = nn.Linear(4, 2), nn.Linear(4, 2)
    theirs.load_state_dict(ours.state_dict())
    with pytest.warns(UserWarning, match="no HeteroLoader gave out") if rank == 0 else nullcontext():
        ours, theirs = arachne.HeteroDDP(ours), DistributedDataParallel(theirs)
        x = torch.randn(3, 4)
        for model in (ours, theirs):
            with model.no_sync():
                model(x).square().mean().backward()
            model(x + 1).square().mean().backward()
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["module.weight", "module.bias"]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.grad, b.grad)
    copy.deepcopy(ours.module)


def test_without_a_loader_it_is_distributed_data_parallel():
    run_ranks(2, like_ddp)


def unused():
    loader = arachne.HeteroLoader(data(), 6, sharing=Wild(2))
    model = arachne.HeteroDDP(build(Case(net={"sometimes": True})), loader=loader)
    first = next(iter(loader))
    F.cross_entropy(model(first[0]), first[1]).backward()
    assert model.module.never.grad is None
    assert model.module.first.weight.grad is not None
    assert model.module.first.weight.grad.abs().sum() > 0


def test_a_parameter_that_no_rank_uses_keeps_no_gradient():
    run_ranks(2, unused)


def scaled():
    """Under a gradient scaler, with one overflow that all ranks must see."""
    loader = arachne.HeteroLoader(data(), 6, sharing=Wild(2, 3, (2, 3)))
    model = arachne.HeteroDDP(build(Case()).float(), loader=loader)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    values = []
    for step, batch in enumerate(loader):
        with loader.step(optimizer, scaler):
            optimizer.zero_grad()
            loss = penalised(model, (batch[0].float(), batch[1]))
            if step == 2 and torch.distributed.get_rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        values.append(scaler.get_scale())
    return values, [p.tolist() for p in model.parameters()]


def test_a_gradient_scaler_and_clipping_act_once_a_step_and_alike_everywhere():
    (scales, values), *others = run_ranks(2, scaled)
    assert all(other == (scales, values) for other in others)
    assert min(scales) < max(scales)


def refused():
    with pytest.raises(UsageError, match="weighed twice"):
        arachne.HeteroDDP(DistributedDataParallel(nn.Linear(2, 2)))
    around = DistributedDataParallel(arachne.HeteroDDP(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="inside DistributedDataParallel"):
        around(torch.ones(1, 2))
    rank = torch.distributed.get_rank()
    with pytest.raises(UsageError, match="module of rank 1 differs"):
        arachne.HeteroDDP(nn.Linear(2, 2 + rank))
    loader = arachne.HeteroLoader(data(), 6, sharing=Wild(2, 0, (1, 1)))
    model = arachne.HeteroDDP(build(Case()), loader=loader)
    with pytest.raises(UsageError, match="comes in several batches"):
        penalised(model, next(iter(loader)))
    loader = arachne.HeteroLoader(data(), 6, sharing=Wild(2))
    model = arachne.HeteroDDP(nn.Sequential(nn.Embedding(9, 2, sparse=True)).double(), loader=loader)
    next(iter(loader))
    with pytest.raises(arachne.ModelError, match="sparse"):
        model(torch.tensor([1, 2])).sum().backward()


def test_what_would_be_silently_wrong_is_refused():
    run_ranks(2, refused)


def warned():
    if torch.distributed.get_rank():
        arachne.HeteroDDP(Net(normed=True))
        return
    with pytest.warns(UserWarning, match=r"norm \(1 in all\) normalises over one rank"):
        arachne.HeteroDDP(Net(normed=True))


class Twice(nn.Module):
    """Goes through one layer twice, each time in a backward of its own, and has a part that nothing uses."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_parameter_with_two_gradients_in_one_backward_is_refused():
    model = arachne.HeteroDDP(Twice())
    with pytest.raises(UsageError, match="two gradients in one backward"):
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()


def test_local_statistics_of_a_batch_are_warned_of():
    run_ranks(2, warned)


def noisy():
    """The noise of the first two steps, each told one step later."""
    loader = arachne.HeteroLoader(data(24), 6, sharing=Wild(3, 8), shuffle=False)
    model = arachne.HeteroDDP(build(Case()), loader=loader, noise=True)
    found, shares = [], []
    for batch in loader:
        shares.append(loader.shares)
        model.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        found.append(model.noise)
    return found, shares


def test_the_gradient_noise_is_that_of_the_ranks_own_gradients():
    found, *others = run_ranks(3, noisy)
    assert all(other == found for other in others)
    model, (x, kinds) = build(Case()), data(24).tensors
    readings, all_shares = found
    assert readings[0] is None
    for step, shares in enumerate(all_shares[:-1]):
        groups, first, whole = [], 6 * step, 0.0
        for share in shares:
            loss = F.cross_entropy(
                model(x[first : first + share]), kinds[first : first + share], reduction="sum"
            )
            gradient = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters())[1:])]
            )
            groups.append(Group(weight=share, squared_norm=float(gradient.square().sum())))
            whole, first = whole + gradient, first + share
        if sum(share > 0 for share in shares) < 2:
            assert readings[step + 1] is None
            continue
        norms = SegmentNorms(groups=groups, squared_norm=float(whole.square().sum()))
        wanted = measure_noise([norms], samples=6)
        assert readings[step + 1].noise == pytest.approx(wanted.noise, rel=1e-9)
        assert readings[step + 1].signal == pytest.approx(wanted.signal, rel=1e-9)


def balanced():
    """The default balancer gets a reading of every rank after the first steps."""
    loader = arachne.HeteroLoader(data(60), 6)
    model = arachne.HeteroDDP(build(Case()))
    seen = []
    observe, loader.link.sharing.observe = loader.link.sharing.observe, seen.append
    for batch in loader:
        penalised(model, batch).backward()
        if seen:
            observe(seen[-1])
    return [[(r.samples, len(r.ready), r.outside_s > 0, r.backward_s > 0) for r in one] for one in seen]


def test_readings_of_all_ranks_reach_the_balancer_alike():
    first, second = run_ranks(2, balanced)
    assert first == second
    assert len(first) >= 6
    assert all(
        outside and backward and buckets == 1 for one in first for _, buckets, outside, backward in one
    )
    assert {sum(samples for samples, *_ in one) for one in first} == {6}


def test_a_lone_process_trains_without_a_group():
    model = arachne.HeteroDDP(build(Case()))
    loader = arachne.HeteroLoader(data(), 6)
    for batch in loader:
        with loader.step():
            penalised(model, batch).backward()
    assert loader.shares == ()
    assert model.module.first.weight.grad is not None
