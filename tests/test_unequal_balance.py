"""Real ranks of unlike speed: shares learnt from what the reducer read reach the ratio of speeds."""

import time
from statistics import median

import torch
from torch import nn
from torch.utils.data import TensorDataset

import arachne_runtime as arachne
from arachne_runtime.testing import run_ranks


class Sleep(torch.autograd.Function):
    """Takes so many seconds a row, forward and backward: a device's speed, whatever else the machine does."""

    @staticmethod
    def forward(ctx, x_BD, seconds_a_row):
        ctx.seconds = seconds_a_row * len(x_BD)
        time.sleep(ctx.seconds)
        return x_BD.clone()

    @staticmethod
    def backward(ctx, grad_BD):
        time.sleep(ctx.seconds)
        return grad_BD, None


class Slow(nn.Module):
    def __init__(self, seconds_a_row: float):
        super().__init__()
        self.first, self.last, self.seconds_a_row = nn.Linear(4, 4), nn.Linear(4, 2), seconds_a_row

    def forward(self, x_BD):
        return self.last(Sleep.apply(self.first(x_BD), self.seconds_a_row))


def train(speeds, steps):
    """Rows of this rank in each step, and what its balancer predicts."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    loader = arachne.HeteroLoader(data, 32)
    model = arachne.HeteroDDP(Slow(speeds[torch.distributed.get_rank()]), loader=loader)
    rows = []
    while len(rows) < steps:
        for x, y in loader:
            rows.append(loader.num_rows)
            (model(x) - y).square().mean().backward()
    return rows


def test_shares_reach_the_ratio_of_speeds():
    one, two = run_ranks(2, train, (1e-3, 3e-3), 50, timeout_s=110)
    assert (one[0], two[0]) == (16, 16)
    assert all(a + b == 32 for a, b in zip(one, two, strict=True))
    assert 22 <= median(one[20:]) <= 26  # now and then a busy machine looks like a slower rank
