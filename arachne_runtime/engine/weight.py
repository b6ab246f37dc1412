"""What each loss is multiplied by, so that all micro-batches add up to the loss of the global batch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError
from ..mesh import Mesh


class Weight(Protocol):
    """The factor of a loss over some rows, and what it divides by."""

    def of(self, num_rows: int) -> float:
        """Factor of the loss of ``num_rows`` rows."""
        ...

    def count(self) -> int:
        """Rows or items of the global batch."""
        ...


@dataclass(frozen=True, slots=True)
class RowWeight:
    """For a loss that is the mean over its rows."""

    num_rows: int
    """Of the global batch."""

    def of(self, num_rows: int) -> float:
        """Part of the global batch that these rows are."""
        return num_rows / self.num_rows

    def count(self) -> int:
        """Rows of the global batch."""
        return self.num_rows


@dataclass(slots=True)
class ItemWeight:
    """For a loss that is a sum over items (tokens), whose number each rank knows only of its own rows."""

    total: Tensor
    work: dist.Work | None
    may_be_none: bool = False
    """Whether a batch without items is fine: its losses are sums over none."""

    @classmethod
    def start(cls, num_items: int, mesh: Mesh, *, may_be_none: bool = False) -> "ItemWeight":
        """Start adding up the items of all ranks; the first loss waits for the result."""
        total = torch.tensor([num_items], dtype=torch.int64, device=mesh.device)
        work = dist.all_reduce(total, async_op=True) if mesh.num_ranks > 1 else None
        return cls(total, work, may_be_none)

    def of(self, num_rows: int) -> float:
        """One item's part; UsageError where there are no items at all."""
        count = self.count()
        if count <= 0 and not self.may_be_none:
            raise UsageError(
                f"num_items counts {count} items in the global batch; a mean over none has no value"
            )
        return 1 / max(count, 1)

    def count(self) -> int:
        """Items of the global batch."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return int(self.total.item())


def weight_of(
    num_items: Callable[[Any], Any] | None,
    counted: Iterable[Any],
    num_rows: int,
    mesh: Mesh,
    *,
    may_be_none: bool = False,
) -> Weight:
    """By rows; or, with ``num_items``, by the items of the global batch, counted before any loss.

    Args:
        num_items: Counts the items of some samples.
        counted: The samples whose items this rank adds to those of others, by micro-batch.
        num_rows: Of the global batch.
        mesh: The ranks.
        may_be_none: Whether a batch without items is fine.

    """
    if num_items is None:
        return RowWeight(num_rows)
    count = sum(_whole_number(num_items(samples)) for samples in counted)
    return ItemWeight.start(count, mesh, may_be_none=may_be_none)


def _whole_number(items: Any) -> int:
    """What ``num_items`` gave, a number or a tensor of one; UsageError for what would be rounded."""
    count = int(items)
    if count != items or count < 0:
        raise UsageError(
            f"num_items(batch) gave {items}; it counts items: a whole number, 0 or more (weights of items "
            "belong into the loss)"
        )
    return count
