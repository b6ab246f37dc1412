"""The mean of a loss over all samples of a loader, the same number on every rank, whatever the shares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.evaluate import evaluating
from ..errors import UsageError
from .loader import HeteroLoader
from .peers import Place


def evaluate(model: nn.Module, loader: HeteroLoader, loss: Callable[[nn.Module, Any], Any]) -> float:
    """Mean of ``loss(model, batch)`` over the samples (or items) of one epoch; every rank calls it.

    Args:
        model: Is in eval mode meanwhile, without gradients.
        loader: With ``num_items``, the mean is over items.
        loss: The mean over the samples (or items) of a batch: a number or a tensor of one.

    Raises:
        UsageError: No samples or items at all.

    """
    total = torch.zeros((), dtype=torch.float64)
    count = 0.0
    with evaluating([model]):
        for batch in loader:
            if amount := loader.amount:
                total = total.to(_device(value := loss(model, batch))) + amount * value
                count += amount
    rows = loader.link.peers.table(Place.EVALUATION, [float(total), count]).rows()
    weight = sum(row[1] for row in rows)
    if weight <= 0:
        raise UsageError("an evaluation of no samples or items has no mean; give batches that are not empty")
    return sum(row[0] for row in rows) / weight


def _device(value: Any) -> torch.device:
    return value.device if isinstance(value, torch.Tensor) else torch.device("cpu")
