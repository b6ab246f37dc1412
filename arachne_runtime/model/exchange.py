"""Rows that go from every member of a group to every other, in unequal numbers, with their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..measure.collectives import Timer, collective, recording
from ..plan.shards import even_part


@dataclass(frozen=True, slots=True)
class Peers:
    """The members of a process group in an order of their own; torch numbers them by rank."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Rank of each member, by coordinate."""
    here: int
    """Coordinate of this rank."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, ranks: Sequence[int]) -> "Peers":
        """``ranks`` by coordinate, those of the group."""
        return cls(group, tuple(ranks), ranks.index(dist.get_rank()))

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Coordinates in the order of the ranks, which is that of the group."""
        return tuple(sorted(range(len(self.ranks)), key=self.ranks.__getitem__))


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> Tensor:
    """Hand the first ``sent[0]`` rows to member 0, the next to member 1; what comes, in the same order.

    Every member calls it, also without a row. Gradients go the way back.
    """
    result: Tensor = _Exchange.apply(rows, tuple(sent), tuple(received), peers)  # type: ignore[no-untyped-call]
    return result


def gather(rows: Tensor, counts: Sequence[int], peers: Peers) -> Tensor:
    """The rows of all members, ``counts`` of them by member; their gradients are added up."""
    return exchange(_repeated(rows, len(peers)), [len(rows)] * len(peers), counts, peers)


def scatter_sum(rows: Tensor, counts: Sequence[int], peers: Peers) -> Tensor:
    """The sum over all members of this one's part of their ``rows``; the opposite of ``gather``."""
    mine = counts[peers.here]
    parts = exchange(rows, counts, [mine] * len(peers), peers)
    return parts.view(len(peers), mine, *rows.shape[1:]).sum(0)


def own_part(rows: Tensor, peers: Peers) -> Tensor:
    """The even part that is this member's, of ``rows`` that all hold alike; their gradient is alike too."""
    result: Tensor = _OwnPart.apply(rows, peers)  # type: ignore[no-untyped-call]
    return result


def all_parts(part: Tensor, num_rows: int, peers: Peers) -> Tensor:
    """The ``num_rows`` rows of which every member holds its even part; the opposite of ``own_part``."""
    result: Tensor = _AllParts.apply(part, num_rows, peers)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], peers: Peers
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.peers, ctx.timer = sent, received, peers, recording()
        return _exchange(rows, sent, received, peers, ctx.timer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.peers, ctx.timer), None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: Peers) -> Tensor:
        ctx.num_rows, ctx.peers, ctx.timer = len(rows), peers, recording()
        return _part(rows, peers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_parts(gradients[0], ctx.num_rows, ctx.peers, ctx.timer), None


class _AllParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, num_rows: int, peers: Peers) -> Tensor:
        ctx.peers = peers
        return _all_parts(part, num_rows, peers, recording())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _part(gradients[0], ctx.peers), None, None


def _part(rows: Tensor, peers: Peers) -> Tensor:
    mine = even_part(len(rows), peers.here, len(peers))
    return rows[mine.start : mine.stop].clone()


def _all_parts(part: Tensor, num_rows: int, peers: Peers, timer: Timer | None) -> Tensor:
    counts = [len(even_part(num_rows, index, len(peers))) for index in range(len(peers))]
    return _exchange(_repeated(part, len(peers)), [len(part)] * len(peers), counts, peers, timer)


def _exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers, timer: Timer | None
) -> Tensor:
    order = peers.by_rank
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    given = _reordered(rows, sent, order).contiguous()
    with collective("experts all_to_all", sent_bytes=given.nbytes, to=timer):
        dist.all_to_all_single(
            found,
            given,
            [received[member] for member in order],
            [sent[member] for member in order],
            group=peers.group,
        )
    back = sorted(range(len(order)), key=order.__getitem__)
    return _reordered(found, [received[member] for member in order], back)


def _reordered(rows: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """The runs of ``counts`` rows in another order."""
    if list(order) == sorted(order):
        return rows
    runs = torch.split(rows, list(counts))
    return torch.cat([runs[index] for index in order])


def _repeated(rows: Tensor, times: int) -> Tensor:
    return rows.expand(times, *rows.shape).flatten(0, 1)
