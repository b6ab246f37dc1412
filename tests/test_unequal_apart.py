"""Ranks that are at different places of their scripts find out at once, and say where each is."""

import pytest
import torch.distributed as dist
import torch.nn.functional as F

import arachne_runtime as arachne
from arachne_runtime.errors import WorkerFailedError
from arachne_runtime.testing import run_ranks
from tests.unequal import Net, data, items


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(kind, num_items=None):
    loader = arachne.HeteroLoader(data(), 4, num_items=num_items)
    held_out = arachne.HeteroLoader(data(), 8)
    model = arachne.HeteroDDP(Net().double(), loader=loader)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            loss = loss_of(model, (x, y))
            if number == 2 and dist.get_rank() == 1:
                if kind == "leave":
                    break
                if kind == "skip":
                    continue
                if kind == "evaluate":
                    arachne.evaluate(model, held_out, loss_of)
            loss.backward()
            model.zero_grad()


STEP = "rank 0 sums the gradients of step 2"


@pytest.mark.parametrize(
    ("kind", "num_items", "there"),
    [
        ("skip", None, "rank 1 sums the gradients of step 3"),
        ("skip", items, "rank 1 counts the items of step 3"),
        ("leave", None, "rank 1 begins epoch 1"),
        ("evaluate", None, "rank 1 begins epoch 0"),
    ],
)
def test_a_rank_that_goes_its_own_way_ends_all_at_once(kind, num_items, there):
    with pytest.raises(WorkerFailedError, match=f"{STEP} while {there}: every rank takes the same steps"):
        run_ranks(2, train, kind, num_items, timeout_s=30)


def test_ranks_at_one_place_hear_each_other():
    assert run_ranks(2, train, "none", items, timeout_s=60) == [None, None]
