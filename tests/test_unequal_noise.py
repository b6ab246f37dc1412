"""Gradient noise from real ranks: by parameter group, as Adam divides it, from every micro-batch of a sum."""

from contextlib import nullcontext
from itertools import chain

import pytest
import torch
import torch.nn.functional as F

import arachne_runtime as arachne
from arachne_runtime.batch import Group, SegmentNorms, measure_noise
from arachne_runtime.data_parallel.space import Space
from arachne_runtime.testing import run_ranks
from tests.unequal import Case, Wild, build, data

BATCH = 6


def wanted(model, groups, divisors, pieces):
    """(noise, signal) by parameter group, of one sum over ``pieces`` of the data, by autograd alone."""
    x, kinds = data(48).tensors
    flat = [parameter for group in groups for parameter in group]
    by_piece = []
    for first, share in pieces:
        rows = slice(first, first + share)
        loss = F.cross_entropy(model.module(x[rows]), kinds[rows], reduction="sum")
        gradients = torch.autograd.grad(loss, flat)
        by_piece.append([g / d for g, d in zip(gradients, divisors, strict=True)])
    found, start = [], 0
    for group in groups:
        ours = [torch.cat([g.flatten() for g in row[start : start + len(group)]]) for row in by_piece]
        start += len(group)
        parts = [
            Group(weight=share, squared_norm=float(h.square().sum()))
            for (_, share), h in zip(pieces, ours, strict=True)
        ]
        norms = SegmentNorms(groups=parts, squared_norm=float(sum(ours).square().sum()))
        reading = measure_noise([norms], samples=sum(share for _, share in pieces))
        found.append((reading.noise, reading.signal))
    return found


def pieces_of(step, shares):
    first, found = BATCH * step, []
    for share in shares:
        if share:
            found.append((first, share))
        first += share
    return found


def groups_of(model):
    net = model.module
    return [[net.first.weight, net.first.bias], [net.last.weight, net.last.bias]]


def divided(optimizer, parameters):
    """What Adam would divide by if every gradient of a tensor were as large as its last ones on average."""
    states = [optimizer.state[p] for p in parameters]
    found = []
    for state in states:
        square, step = state["exp_avg_sq"], float(state["step"])
        usual = square.mean() / (1 - 0.999**step)
        found.append(((0.999 * square + 0.001 * usual) / (1 - 0.999 ** (step + 1))).sqrt() + 1e-2)
    return found


def test_a_first_gradient_counts_as_adam_will_take_it():
    """Of a rare token: not as divided by ε, or nothing else would be seen."""
    rows = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    optimizer = torch.optim.Adam([rows], 0.1, amsgrad=True)
    rows.grad = torch.ones_like(rows)
    rows.grad[3] = 0
    for _ in range(20):
        optimizer.step()
    ((_, usual),) = Space.of([rows], [optimizer]).squared_norms([0], [rows.grad])
    first = torch.zeros_like(rows)
    first[3] = 1
    ((_, square),) = Space.of([rows], [optimizer]).squared_norms([0], [first])
    assert float(usual) == pytest.approx(9, rel=0.02)  # 9 numbers of √v̂ = 1
    rows.grad = first
    optimizer.step()
    state = optimizer.state[rows]
    v = state["exp_avg_sq"][3] / (1 - 0.999 ** float(state["step"]))
    assert float(square) == pytest.approx(float((1 / v).sum()), rel=0.4)


def by_adam(num_ranks):
    loader = arachne.HeteroLoader(data(48), BATCH, sharing=Wild(num_ranks, 8), shuffle=False)
    model = arachne.HeteroDDP(build(Case()), loader=loader)
    groups = groups_of(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], 0.01, eps=1e-2)
    model.measure_noise(optimizer)
    awaited, compared = None, 0
    for step, (x, kinds) in enumerate(loader):
        expected, pieces = None, pieces_of(step, loader.shares)
        if step and len(pieces) > 1:
            expected = wanted(model, groups, divided(optimizer, [*groups[0], *groups[1]]), pieces)
        optimizer.zero_grad()
        F.cross_entropy(model(x), kinds).backward()
        found = [(one.noise, one.signal) for one in model.noise_by_group]
        if awaited is None:
            assert found == []
            assert model.noise is None
        else:
            assert [*chain(*found)] == pytest.approx([*chain(*awaited)], rel=1e-3)  # Adam's step is a float32
            assert model.noise.noise == pytest.approx(sum(noise for noise, _ in awaited), rel=1e-3)
            compared += 1
        optimizer.step()
        awaited = expected
    return compared


def test_noise_is_by_group_and_in_the_space_of_adam():
    assert all(compared >= 4 for compared in run_ranks(3, by_adam, 3))


def accumulated(num_ranks, caps, every):
    """Sums of two batches of each rank: by ``no_sync``, or in rounds of the loader."""
    loader = arachne.HeteroLoader(data(48), BATCH, sharing=Wild(num_ranks, 5, caps), shuffle=False)
    model = arachne.HeteroDDP(build(Case()), loader=loader, noise=True)
    groups = [[p for group in groups_of(model) for p in group]]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pieces, awaited, compared, first = [], None, 0, 0
    for number, (x, kinds) in enumerate(loader):
        for share in loader.shares:
            pieces += [(first, share)] if share else []
            first += share
        due = (number + 1) % every == 0 and loader.link.turn.is_last
        if due:
            expected = wanted(model, groups, [torch.ones(())] * 4, pieces)
            pieces = []
        with loader.step(optimizer):
            with nullcontext() if due or caps else model.no_sync():
                F.cross_entropy(model(x), kinds).backward()
            if due:
                if awaited is not None:
                    assert (model.noise.noise, model.noise.signal) == pytest.approx(awaited[0], rel=1e-9)
                    compared += 1
                optimizer.step()
                optimizer.zero_grad()
                awaited = expected
    return compared


@pytest.mark.parametrize(("caps", "every"), [(None, 2), ((1, 2), 1)])
def test_micro_batches_are_groups(caps, every):
    assert all(compared >= 3 for compared in run_ranks(2, accumulated, 2, caps, every))
