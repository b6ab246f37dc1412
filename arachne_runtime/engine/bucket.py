"""One message of gradients: parts of parameters side by side in a flat buffer, summed over their holders."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..plan.limits import BUCKET_BYTES
from ..plan.shards import Atom, Box, Intervals, boxes
from .precision import gradient_dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter that some ranks hold alike, as one of them sees it."""

    parameter: nn.Parameter
    """What this rank holds, whole or a shard."""
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...] | None
    """Where each run lies in the part and in the parameter here; None: the part is all that is here."""
    contributes: bool
    """Whether the sum takes this rank's gradient; else it is a copy of another's."""
    counts: bool
    """Whether this rank counts it in the norm."""

    @classmethod
    def of(cls, parameter: nn.Parameter, atom: Atom, held: tuple[Intervals, ...], rank: int) -> "Piece":
        """``atom`` on a rank that holds ``held`` of the whole parameter."""
        cut = None if atom.intervals == held else tuple(boxes(atom.intervals, held))
        return cls(parameter, atom.shape, cut, rank in atom.contributors, rank == atom.members[0])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def gradients(self) -> Iterator[Tensor]:
        """Views of the gradient, which must be there."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.boxes is None:
            yield gradient
        else:
            yield from (gradient[here] for _, here in self.boxes)


@dataclass(slots=True)
class Bucket:
    """Pieces of one dtype that are summed in one message."""

    pieces: Sequence[Piece]
    flat: Tensor
    """All gradients one behind the other, then for each piece how many contributors have a gradient."""
    views: Sequence[Tensor]
    group: dist.ProcessGroup
    work: dist.Work | None = None
    complete: bool = False
    """Whether every parameter has a gradient on this rank, so that the counts need not be read."""
    measures: bool = False
    """Whether ``own`` is taken."""
    own: Tensor | None = None
    """Squared norm, in float64, of what this rank added to the last sum."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], group: dist.ProcessGroup) -> "Bucket":
        """An empty bucket for pieces of one dtype and device."""
        sizes = [piece.numel for piece in pieces]
        like = pieces[0].parameter
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=gradient_dtype(like), device=like.device)
        *parts, _ = torch.split(flat, [*sizes, len(sizes)])
        views = [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]
        return cls(pieces, flat, views, group)

    def adopt(self) -> None:
        """Move gradients that autograd allocated into the buffer; later ones are added there in place.

        Those of parameters that are only in part in this message stay where they are.
        """
        for piece, view in zip(self.pieces, self.views, strict=True):
            gradient = piece.parameter.grad
            if piece.boxes is None and gradient is not None and gradient is not view:
                view.copy_(gradient)
                piece.parameter.grad = view

    def start(self) -> None:
        """Send the sums on their way."""
        self.adopt()
        have = [piece.parameter.grad is not None for piece in self.pieces]
        self.complete = all(have)
        for piece, view, mine in zip(self.pieces, self.views, have, strict=True):
            if not (mine and piece.contributes):
                view.zero_()
            elif piece.boxes is not None:
                for (there, _), gradient in zip(piece.boxes, piece.gradients(), strict=True):
                    view[there].copy_(gradient)
        given = [mine and piece.contributes for piece, mine in zip(self.pieces, have, strict=True)]
        self.flat[-len(given) :] = torch.tensor(given, dtype=self.flat.dtype)
        self.own = self.squared_norm() if self.measures else None
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def squared_norm(self) -> Tensor:
        """Of all gradients that are in the buffer now, in float64."""
        norm: Tensor = torch.linalg.vector_norm(self.flat[: -len(self.pieces)], dtype=torch.float64)
        return norm.square()

    def finish(self) -> None:
        """Wait; a parameter that got a gradient on any rank has the sum on every rank, others stay None."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        counts = [1] * len(self.pieces) if self.complete else self.flat[-len(self.pieces) :].tolist()
        for piece, view, count in zip(self.pieces, self.views, counts, strict=True):
            if not count:
                piece.parameter.grad = None
            elif piece.boxes is None:
                piece.parameter.grad = view
            else:
                _put_back(piece, view)


def pack(pieces: Iterable[Piece], group: dist.ProcessGroup) -> Iterator[Bucket]:
    """Buckets of one dtype each, closed at BUCKET_BYTES: alike on every rank of the group."""
    by_dtype: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        dtype = gradient_dtype(piece.parameter)
        waiting = by_dtype.setdefault(dtype, [])
        waiting.append(piece)
        if sum(p.numel for p in waiting) * dtype.itemsize >= BUCKET_BYTES:
            yield Bucket.of(by_dtype.pop(dtype), group)
    for waiting in by_dtype.values():
        yield Bucket.of(waiting, group)


def _put_back(piece: Piece, view: Tensor) -> None:
    assert piece.boxes is not None
    if piece.parameter.grad is None:
        piece.parameter.grad = torch.zeros_like(piece.parameter, dtype=view.dtype)
    for (there, _), gradient in zip(piece.boxes, piece.gradients(), strict=True):
        gradient.copy_(view[there])
