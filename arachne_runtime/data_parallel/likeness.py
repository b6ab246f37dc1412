"""Whether ranks have the same datasets and parameters, by numbers that are cheap to tell."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from ..errors import UsageError
from .peers import Peers, Place


def number_of_cuts(dataset: Dataset[Any]) -> int:
    """A checksum of the indices of all ``Subset`` in a dataset, which scripts draw or cut by rank."""
    if isinstance(dataset, Subset):
        indices = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        return zlib.crc32(indices.numpy().tobytes(), number_of_cuts(dataset.dataset))
    if isinstance(dataset, ConcatDataset):
        return zlib.crc32(repr([number_of_cuts(part) for part in dataset.datasets]).encode())
    return 0


@torch.no_grad()
def refuse_unlike_values(parameters: Sequence[nn.Parameter], peers: Peers) -> None:
    """Compare the first and last element of each parameter; all ranks call it together.

    Raises:
        UsageError: Ranks differ, on all of them.

    """
    ends = [p[(place,) * p.dim()].abs().double() for p in parameters if p.numel() for place in (0, -1)]
    told = torch.stack(ends).nan_to_num().cpu().numpy().tobytes() if ends else b""
    found = [row[0] for row in peers.table(Place.FIRST_STEP, [zlib.crc32(told)]).rows()]
    if unlike := [rank for rank, number in enumerate(found) if number != found[0]]:
        raise UsageError(
            f"the parameters of rank {unlike[0]} are not those of rank 0 in the first step: all were alike "
            "when HeteroDDP was made; load a checkpoint before that, or on every rank"
        )
