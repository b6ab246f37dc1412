"""What ``arachne profile MODULE:NAME`` times: a model with its loss, its optimizer and made-up batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import default_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named training job without its data.

    gpt = arachne.Workload(name="gpt-small", model=lambda: GPT(config), loss=loss_fn,
                           optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4),
                           batch=lambda n: torch.randint(50304, (n, 1024)), sequence=1024)

    """

    name: str
    model: Callable[[], nn.Module]
    """Constructs the model: a class marked with ``pipelined``, or an ``nn.Sequential``."""
    loss: Callable[[Any, Any], Tensor]
    """``loss(output, batch)``: the mean over the samples it is given."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[int], Any]
    """Makes a batch of that many samples."""
    sequence: int
    """Tokens of a sample; 1 where samples are not sequences."""
    inputs: Callable[[Any], tuple[Tensor, ...]] = default_inputs
    """What the first block is called with, from a batch."""
