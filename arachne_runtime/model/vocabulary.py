"""A vocabulary that is shared out in a tensor-parallel group: its embedding, its head, and its loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..errors import ModelError
from ..measure.collectives import collective
from .exchange import Peers

IGNORED = -100
"""A target that counts for nothing, as in ``torch.nn.functional.cross_entropy``."""
Loss = TypeVar("Loss", bound=Callable[..., Tensor])

_MARK = "__arachne_takes_shards__"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which words of a vocabulary this rank holds."""

    sizes: tuple[int, ...]
    """Words of each rank, by coordinate."""
    peers: Peers

    @property
    def words(self) -> range:
        """Its own."""
        start = sum(self.sizes[: self.peers.here])
        return range(start, start + self.sizes[self.peers.here])


_HERE: ContextVar[Shard | None] = ContextVar("arachne_vocabulary_shard", default=None)


def vocabulary_parallel(loss: Loss) -> Loss:
    """Mark a ``loss(output, batch)`` that takes the logits as they are: each rank's part of the vocabulary.

    It computes them with ``vocabulary_parallel_cross_entropy``. Other losses get whole logits, which every
    rank of the group then holds.

        @arachne.vocabulary_parallel
        def loss(logits_BSV, batch):
            return arachne.vocabulary_parallel_cross_entropy(logits_BSV.flatten(0, 1), batch[1].flatten())

    """
    setattr(loss, _MARK, True)
    return loss


def takes_shards(loss: Callable[..., Tensor]) -> bool:
    """Whether a loss is marked."""
    return bool(getattr(loss, _MARK, False))


@contextmanager
def sharded_logits(shard: Shard | None) -> Iterator[None]:
    """Inside, logits have only the words of ``shard``; None: all."""
    token = _HERE.set(shard)
    try:
        yield
    finally:
        _HERE.reset(token)


def over_shard(loss: Callable[[Any, Any], Tensor], shard: Shard | None) -> Callable[[Any, Any], Tensor]:
    """A user's loss, told which words of the logits this rank has; None: all."""
    if shard is None:
        return loss

    def of_shard(output: Any, batch: Any) -> Tensor:
        with sharded_logits(shard):
            return loss(output, batch)

    return of_shard


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORED, reduction: str = "mean"
) -> Tensor:
    """``cross_entropy`` of logits whose vocabulary may be shared out: (N, V) and (N,) → one number, or (N,).

    Without tensor parallel, outside an engine, and for a loss that is not marked ``vocabulary_parallel``, it
    is ``torch.nn.functional.cross_entropy``.

    Args:
        logits: Of the words that this rank holds.
        targets: Words, numbered in the whole vocabulary. Logits of 16 bits are computed with in float32.
        ignore_index: A target that counts for nothing.
        reduction: "mean" over the targets that count, "sum", or "none".

    Raises:
        ModelError: Logits that do not have the words of this rank, or a reduction that is not known.

    """
    shard = _HERE.get()
    if logits.dtype.itemsize < torch.float32.itemsize:  # as autocast does, and alike in every plan
        logits = logits.float()
    if shard is None:
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    if logits.dim() != 2 or logits.shape[1] != len(shard.words):
        raise ModelError(
            f"vocabulary_parallel_cross_entropy takes logits of shape (N, {len(shard.words)}) on this rank, "
            f"which holds words {shard.words.start}:{shard.words.stop}; got {tuple(logits.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"reduction={reduction!r} is not known; known: mean, sum, none")
    counted = targets != ignore_index
    losses: Tensor = _CrossEntropy.apply(logits, targets.where(counted, shard.words.start), shard)  # type: ignore[no-untyped-call]
    losses = losses * counted
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _CrossEntropy(torch.autograd.Function):
    """-log softmax at the target, of rows that ranks hold in parts."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, shard: Shard) -> Tensor:
        most_N = logits_NV.amax(1)
        with collective("tensor all_reduce", sent_bytes=most_N.nbytes):
            dist.all_reduce(most_N, dist.ReduceOp.MAX, group=shard.peers.group)
        shifted_NV = logits_NV - most_N[:, None]
        mine_N = (targets_N >= shard.words.start) & (targets_N < shard.words.stop)
        at_N = (targets_N - shard.words.start).where(mine_N, 0)
        of_target_N = shifted_NV.gather(1, at_N[:, None])[:, 0] * mine_N
        weights_NV = shifted_NV.exp_()
        both_2N = torch.stack((weights_NV.sum(1), of_target_N))
        with collective("tensor all_reduce", sent_bytes=both_2N.nbytes):
            dist.all_reduce(both_2N, group=shard.peers.group)
        ctx.save_for_backward(weights_NV.div_(both_2N[0][:, None]), at_N, mine_N)
        return both_2N[0].log() - both_2N[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax_NV, at_N, mine_N = ctx.saved_tensors
        found_NV = softmax_NV * gradients[0][:, None]
        found_NV.scatter_add_(1, at_N[:, None], -(gradients[0] * mine_N)[:, None])
        return found_NV, None, None


def gather_last(part: Tensor, shard: Shard) -> Tensor:
    """The whole last dim, of which each rank holds its ``sizes``: (..., V/n) → (..., V)."""
    whole: Tensor = _GatherLast.apply(part, shard)  # type: ignore[no-untyped-call]
    return whole


class _GatherLast(torch.autograd.Function):
    """What follows runs alike on every rank, so that each takes its part of the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard) -> Tensor:
        ctx.words = shard.words
        most = max(shard.sizes)
        mine = F.pad(part, (0, most - part.shape[-1])).contiguous()
        found = [torch.empty_like(mine) for _ in shard.sizes]
        with collective("tensor all_gather", sent_bytes=mine.nbytes):
            dist.all_gather([found[index] for index in shard.peers.by_rank], mine, group=shard.peers.group)
        return torch.cat([f[..., :size] for f, size in zip(found, shard.sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][..., ctx.words.start : ctx.words.stop].contiguous(), None


def own_words(words: Tensor, held: range) -> tuple[Tensor, Tensor]:
    """Indices into the rows that this rank holds, 0 where another one does; and where that is."""
    others = (words < held.start) | (words >= held.stop)
    return (words - held.start).masked_fill(others, 0), others
