"""Loads the rows that one rank needs, step by step, through ``torch.utils.data.DataLoader``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..errors import UsageError
from .batch import slice_rows
from .chance import Seeded, refusing_draws
from .order import GlobalOrder

NeededRows: TypeAlias = Callable[[int], Sequence[range]]
"""From the rows of a global batch to the ranges of them that a rank needs."""


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """A ``StepBatch`` that holds some ranges of rows, each collated by itself."""

    num_rows: int
    pieces: tuple[tuple[range, Any], ...]
    samples: tuple[int, ...] = ()
    """What ranks must agree on: number of samples, seed, and step of the order, first and last sample."""
    step: int = 0
    """Of the order, over all epochs."""
    feed: int | None = None
    """Which call of ``session.batches`` gave it, counted from 0."""

    def rows(self, rows: range) -> Any:
        """A loaded range, or a part of one; UsageError for rows that this rank did not load."""
        for held, tree in self.pieces:
            if held == rows:
                return tree
            if held.start <= rows.start <= rows.stop <= held.stop:
                inside = range(rows.start - held.start, rows.stop - held.start)
                return slice_rows(tree, inside, len(held))
        have = ", ".join(f"{held.start}:{held.stop}" for held, _ in self.pieces) or "none"
        raise UsageError(f"rows {rows.start}:{rows.stop} were not loaded on this rank; loaded: {have}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """What is handed to torch's DataLoader as it is."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    """Processes that load ahead; 0: the rank loads its rows itself, when they are due."""
    pin_memory: bool = False
    exact: bool = True
    """Refuse samples that differ when they are read again."""


def load_steps(
    dataset: Dataset[Any],
    order: GlobalOrder,
    steps: range,
    needed: NeededRows,
    settings: LoaderSettings,
    *,
    feed: int | None = None,
) -> Iterator[LoadedRows]:
    """The batches of ``steps`` (counted over all epochs), each with the rows that this rank needs.

    Workers read ahead across steps and epochs. A rank that needs no rows gets batches without rows, so that
    all ranks take the same number of steps.
    """
    pieces = (
        [(step // order.steps_per_epoch, sample) for sample in order.samples(step, rows)]
        for step in steps
        for rows in merged(needed(order.num_rows(step)))
    )
    loader: DataLoader[Any] = DataLoader(
        Seeded(dataset, order.seed, exact=settings.exact),
        batch_sampler=_Listed(pieces),
        collate_fn=refusing_draws(settings.collate_fn or default_collate, "collate_fn"),
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        generator=torch.Generator().manual_seed(order.seed),  # else it draws from the script's random state
    )
    trees = iter(loader)
    for step in steps:
        num_rows = order.num_rows(step)
        ends = (*order.samples(step, range(1)), *order.samples(step, range(num_rows - 1, num_rows)))
        same = (order.num_samples, order.seed, step, *ends)
        pieces_of_step = tuple((rows, next(trees)) for rows in merged(needed(num_rows)))
        yield LoadedRows(num_rows, pieces_of_step, same, step, feed)


def merged(ranges: Sequence[range]) -> tuple[range, ...]:
    """The ranges in ascending order, without empty ones and repetitions.

    Raises:
        UsageError: Two of them overlap without being equal.

    """
    kept = tuple(sorted({rows for rows in ranges if rows}, key=lambda rows: (rows.start, rows.stop)))
    for a, b in pairwise(kept):
        if b.start < a.stop:
            raise UsageError(f"rows {a.start}:{a.stop} and {b.start}:{b.stop} of a batch overlap")
    return kept


def num_samples_of(dataset: Dataset[Any]) -> int:
    """Length of a map-style dataset; UsageError for one that is only a stream."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} is a stream; the one global order of samples needs a dataset with "
            "__len__ and __getitem__"
        )
    return len(dataset)


class _Listed:
    """A batch sampler that yields lists of indices once, in order."""

    def __init__(self, lists: Iterator[list[tuple[int, int]]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._lists
