"""The batch of one step: rows of the global batch, of which a rank may hold only those it needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelError, UsageError

_INPUT_KEYS = ("inputs", "input_ids", "x")


@runtime_checkable
class StepBatch(Protocol):
    """What the engine eats: it asks for rows of the global batch, and never for more than its rank needs."""

    @property
    def num_rows(self) -> int:
        """Rows of the *global* batch; fewer than the plan's for the last batch of an epoch."""
        ...

    def rows(self, rows: range) -> Any:
        """The collated samples of these rows: a tree of tensors with the leading dim ``len(rows)``."""
        ...


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A tree of tensors that holds the whole global batch; rows are slices of it."""

    tree: Any
    num_rows: int

    def rows(self, rows: range) -> Any:
        """Slices of every tensor, without a copy."""
        if not 0 <= rows.start <= rows.stop <= self.num_rows:
            raise UsageError(f"rows {rows.start}:{rows.stop} of a global batch of {self.num_rows} rows")
        return slice_rows(self.tree, rows, self.num_rows)


def as_step_batch(batch: Any) -> StepBatch:
    """A ``StepBatch`` as it is; a tensor, or a tree of tensors that holds the whole global batch, by rows.

    Raises:
        UsageError: No tensor in the tree, or tensors that disagree on the number of rows.

    """
    if isinstance(batch, StepBatch):
        return batch
    return WholeBatch(batch, num_rows_of(batch))


def default_inputs(batch: Any) -> tuple[Tensor, ...]:
    """What the first block is called with, found by common custom.

    The first item of a tuple or list; a mapping's ``inputs``, ``input_ids`` or ``x``; a tensor itself.

    Raises:
        ModelError: Any other batch; pass ``inputs=`` to the engine.

    """
    found = batch
    if isinstance(batch, tuple | list) and batch:
        found = batch[0]
    elif isinstance(batch, Mapping):
        found = next((batch[key] for key in _INPUT_KEYS if key in batch), None)
    if isinstance(found, tuple) and found and all(isinstance(item, Tensor) for item in found):
        return found
    if isinstance(found, Tensor):
        return (found,)
    what = (
        f"a mapping with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    )
    raise ModelError(
        f"which tensors of the batch ({what}) does the first block take? "
        "Say so: engine(..., inputs=lambda batch: (batch['tokens'],))"
    )


def slice_rows(tree: Any, rows: range, num_rows: int) -> Any:
    """The rows of every tensor and array of a tree, and of lists with one value a row; no copies.

    A value may be a list or a mapping itself, as long as it holds no tensors: ``[[1, 2], [3]]`` has two rows.
    Where each has as many values as there are rows, they are columns.
    """
    return _by_rows(tree, num_rows, lambda leaf: leaf[rows.start : rows.stop])


def take_rows(tree: Any, rows: Sequence[int], num_rows: int) -> Any:
    """Copies of some rows, in any order, of all that ``slice_rows`` cuts."""

    def taken(leaf: Any) -> Any:
        return (
            leaf[list(rows)] if isinstance(leaf, Tensor | np.ndarray) else type(leaf)(leaf[r] for r in rows)
        )

    return _by_rows(tree, num_rows, taken)


def join_rows(first: Any, second: Any) -> Any:
    """The one row of each of two trees of the same form, one behind the other.

    Raises:
        UsageError: A list of lists whose rows are not known from its columns.

    """
    if isinstance(first, Tensor):
        return torch.cat((first, second)) if first.dim() else first
    if isinstance(first, np.ndarray):
        return np.concatenate((first, second)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: join_rows(value, second[key]) for key, value in first.items()}
    if isinstance(first, tuple | list):
        if _has_a_value_a_row(first, 1):
            return first + second
        if len(first) == 1 and isinstance(first[0], tuple | list) and not _leading_dims(first, ""):
            raise UsageError("a row of one value, or a column of one row: lists of lists do not tell")
        return _like(first, [join_rows(a, b) for a, b in zip(first, second, strict=True)])
    return first


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)


def to_device(tree: Any, device: torch.device) -> Any:
    """A tree of tensors on ``device``; from pinned memory the copies run beside what the host does next."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, Mapping):
        return {key: to_device(value, device) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _like(tree, [to_device(value, device) for value in tree])
    return tree


def copied(tree: Any) -> Any:
    """A tree whose tensors and arrays in host memory are copies: a script may fill the same memory again."""
    if isinstance(tree, Tensor):
        return tree.clone() if tree.device.type == "cpu" else tree
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _like(tree, [copied(value) for value in tree])
    return tree


def _by_rows(tree: Any, num_rows: int, cut: Callable[[Any], Any]) -> Any:
    """``cut`` of every tensor or array with rows and of every list with a value a row; all else as it is."""
    if isinstance(tree, Tensor | np.ndarray):
        return cut(tree) if tree.ndim else tree
    if isinstance(tree, Mapping):
        return {key: _by_rows(value, num_rows, cut) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        if _has_a_value_a_row(tree, num_rows):
            return cut(tree)
        return _like(tree, [_by_rows(item, num_rows, cut) for item in tree])
    return tree


def _has_a_value_a_row(items: Sequence[Any], num_rows: int) -> bool:
    if len(items) != num_rows or hasattr(items, "_fields") or _leading_dims(items, ""):
        return False
    return not all(isinstance(item, tuple | list) and len(item) == num_rows for item in items)


def _like(tree: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or list like ``tree``, of other items."""
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def num_rows_of(tree: Any) -> int:
    """The leading dim that all tensors and arrays of a tree share; UsageError for none, or several."""
    found = dict(_leading_dims(tree, "batch"))
    sizes = sorted(set(found.values()))
    if len(sizes) == 1:
        return sizes[0]
    if not found:
        raise UsageError(f"a batch is a tensor or a tree of tensors, rows first; found {type(tree).__name__}")
    places = ", ".join(f"{path} has {size}" for path, size in found.items())
    raise UsageError(f"the tensors of a batch must have the same number of rows; {places}")


def _leading_dims(tree: Any, path: str) -> list[tuple[str, int]]:
    if isinstance(tree, Tensor | np.ndarray):
        return [(path, tree.shape[0])] if tree.ndim else []
    if isinstance(tree, Mapping):
        return [pair for key, value in tree.items() for pair in _leading_dims(value, f"{path}[{key!r}]")]
    if isinstance(tree, tuple | list):
        return [pair for i, value in enumerate(tree) for pair in _leading_dims(value, f"{path}[{i}]")]
    return []
