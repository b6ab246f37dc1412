"""What tests of adapters share: ranks as torchrun would have started them, and one process beside them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import arachne_runtime as arachne
from arachne_runtime.data.order import GlobalOrder
from tests.unequal import Net, Wild

ACCUMULATE = 2
"""Batches of an update."""


def net() -> nn.Module:
    torch.manual_seed(7)
    return arachne.convert_batch_norm(Net(normed=True).double())


def mean_loss(model: nn.Module, batches: list[Any]) -> Tensor:
    return sum(F.cross_entropy(model(x), y) for x, y in batches) / ACCUMULATE


@contextmanager
def as_torchrun_starts() -> Iterator[None]:
    """The variables of a rank; the process group is there already, so its address is not used."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_CPU": "true",
    }
    with mock.patch.dict(os.environ, names):
        yield


def wild(loader: Any) -> Any:
    """The same loader, with shares at random."""
    loader.link.sharing = Wild(loader.link.peers.num_ranks)
    return loader


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    loss_of: Callable[[nn.Module, list[Any]], Tensor],
    *,
    global_batch: int,
    epochs: int,
    accumulate: int = 1,
    clip: float | None = None,
    seed: int = 0,
) -> list[float]:
    """One process on the same batches; ``loss_of`` those of one update. Gives the loss of each update."""
    order = GlobalOrder(num_samples=len(dataset), global_batch=global_batch, seed=seed)
    losses = []
    for epoch in range(epochs):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [
            default_collate([dataset[i] for i in order.samples(step, range(order.num_rows(step)))])
            for step in steps
        ]
        for start in range(0, len(batches), accumulate):
            loss = loss_of(model, batches[start : start + accumulate])
            optimizer.zero_grad()
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return losses
