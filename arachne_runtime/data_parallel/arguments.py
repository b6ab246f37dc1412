"""Arguments of DistributedDataParallel, DataLoader and DistributedSampler, told what stands for them here."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, Dataset

from ..errors import UsageError

_OF_LOADERS = {
    "sampler": "the loader has one order of its own; loader.set_epoch(epoch) starts an epoch",
    "batch_sampler": "the loader has one order of its own; loader.set_epoch(epoch) starts an epoch",
    "batch_size": "loader.global_batch is of all ranks, loader.num_rows of this one, and changes",
}
"""What scripts ask a DataLoader for, and what to ask here."""


def refuse_of_ddp(options: Mapping[str, object]) -> None:
    """UsageError for the first of what HeteroDDP has no use for."""
    for name in options:
        where = ": move the module to its device first, and batches as they come" if "device" in name else ""
        raise UsageError(f"HeteroDDP takes no {name}{where}; leave it out")


def checked_dataset(dataset: Dataset[Any]) -> Dataset[Any]:
    """The same; UsageError for a DataLoader."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "HeteroLoader stands for the DataLoader: give it the dataset, and the batch of all ranks"
        )
    return dataset


def checked_batch(global_batch: object, options: Mapping[str, object]) -> int:
    """The same, which is a number of samples.

    Raises:
        UsageError: It is not, or there is none but the batch_size of a DataLoader.

    """
    if "batch_size" in options:
        raise UsageError(
            "HeteroLoader takes no batch_size, which is of one rank: set global_batch, of all ranks together"
        )
    if global_batch is None:
        raise UsageError("global_batch is missing: the samples of all ranks in a step")
    if not isinstance(global_batch, int):
        raise UsageError(
            f"global_batch is a {type(global_batch).__name__}; give the samples of all ranks in a step, an "
            "int (samplers and their epochs are the loader's own: shuffle, seed, set_epoch)"
        )
    return global_batch


def refuse_attribute(name: str) -> NoReturn:
    """AttributeError, with what to ask a HeteroLoader for instead."""
    instead = f": {_OF_LOADERS[name]}" if name in _OF_LOADERS else ""
    raise AttributeError(f"'HeteroLoader' object has no attribute {name!r}{instead}", name=name)
