"""Loads the batches of planned steps through torch's DataLoader, ahead of time where there are workers."""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..data.chance import random_states_kept, seed_all
from ..errors import UsageError

_OURS = ("batch_size", "sampler", "batch_sampler", "generator")
"""Options of a DataLoader that say which samples come when: the loader's own business."""
_PREFETCH = 2
"""Batches that each worker of a DataLoader loads ahead, by default."""


class Feed:
    """Batches in the order in which they are planned."""

    def __init__(self, dataset: Dataset[Any], seed: int, options: dict[str, Any]) -> None:
        """Hand ``options`` to a DataLoader; UsageError for those that choose samples."""
        if refused := [name for name in _OURS if name in options]:
            raise UsageError(
                f"HeteroLoader takes no {refused[0]}: it shares out one global order of samples; set "
                "global_batch, shuffle and seed"
            )
        self._planned: deque[list[tuple[int, int]]] = deque()
        workers, ahead = options.get("num_workers", 0), options.get("prefetch_factor")
        self.lead: int = workers * (ahead or _PREFETCH)
        """Batches that are loaded before they are asked for."""
        self._loader: DataLoader[Any] = DataLoader(
            Drawing(dataset, seed),
            batch_sampler=self,
            generator=torch.Generator().manual_seed(seed),  # else it draws from the script's random state
            **options,
        )
        self._batches: Iterator[Any] | None = None

    def plan(self, epoch: int, samples: Sequence[int]) -> None:
        """One more batch."""
        self._planned.append([(epoch, sample) for sample in samples])

    def next(self) -> Any:
        """The next planned batch, collated."""
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)

    def forget(self) -> None:
        """Drop what is planned and what is loaded."""
        self._planned.clear()
        self._batches = None

    # --- as the batch sampler of the DataLoader, which goes on asking after it found nothing

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> list[tuple[int, int]]:
        if not self._planned:
            raise StopIteration
        return self._planned.popleft()


class Drawing(Dataset[Any]):
    """A dataset whose samples draw under (seed, epoch, sample), whichever rank loads them with which others.

    Python's, NumPy's global and torch's CPU generator are seeded; the script's own states are left alone. A
    dataset that loads many samples at once (``__getitems__``) draws under the first of them.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        """The samples of some (epoch, index)."""
        if type(self._dataset) is TensorDataset:  # draws nothing, and is read faster than seeded
            return [self._dataset[index] for _, index in places]
        many = getattr(self._dataset, "__getitems__", None)
        with random_states_kept():
            if many is None:
                return [self._read(epoch, index) for epoch, index in places]
            self._seed_by(*places[0])
            found: list[Any] = many([index for _, index in places])
            return found

    def _read(self, epoch: int, index: int) -> Any:
        self._seed_by(epoch, index)
        return self._dataset[index]

    def _seed_by(self, epoch: int, index: int) -> None:
        seed_all(zlib.crc32(f"{self._seed}:{epoch}:{index}".encode()))
