"""What one process holds, as one run of bytes in host memory and a word that says what is where in it."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from ..units import Bytes
from .holdings import Holding, Scalars, dtype_called
from .old import Old
from .parts import numel_of, shape_of
from .words import Settings, Word


@dataclass(frozen=True, slots=True)
class Packed:
    """A copy of an ``Old``."""

    word: Word
    """Its parts in the order in which they lie, wide elements first; settings, counts, random states."""
    memory: Tensor
    """(bytes,) of the host."""
    settings: Settings | None = None
    """On its own process: also such as no message holds."""


def packed(old: Old) -> Packed:
    """Copy a state to the host: what it is copied from may change as soon as this returns."""
    ordered = tuple(sorted(old.holdings, key=lambda each: -each.tensor.itemsize))
    memory = torch.empty(sum(each.tensor.nbytes for each in ordered), dtype=torch.uint8)
    word = msgspec.structs.replace(replace(old, holdings=ordered).word(), random=old.random)
    for each, room in zip(ordered, _rooms(word, memory), strict=True):
        room.copy_(each.tensor)
    is_told = old.settings is None or word.settings
    return Packed(word, memory, None if is_told else copy.deepcopy(old.settings))


def unpacked(pack: Packed) -> Old:
    """What was copied, in the memory of the copy."""
    word = pack.word
    assert word.progress is not None
    told = msgspec.msgpack.decode(word.settings, type=Settings) if word.settings else None
    return Old(
        holdings=tuple(
            Holding(each.name, each.key, each.shape, each.part, room, each.is_buffer)
            for each, room in zip(word.parts, _rooms(word, pack.memory), strict=True)
        ),
        scalars=word.scalars,
        frozen=word.frozen,
        settings=told or pack.settings,
        progress=word.progress,
        random=word.random,
        is_kept=True,
    )


def joined(olds: Sequence[Old]) -> Old:
    """What the first one had, and with it the parts that only others of the same step had."""
    mine, *others = olds
    parts = {(each.name, each.key, each.part): each for old in reversed(olds) for each in old.holdings}
    numbers: Scalars = {name: each for old in others for name, each in old.scalars.items()}
    shards = dict.fromkeys(shard for old in olds for shard in old.progress.shards)
    return replace(
        mine,
        holdings=tuple(parts.values()),
        scalars={**numbers, **mine.scalars},
        frozen=tuple(dict.fromkeys(name for old in olds for name in old.frozen)),
        settings=mine.settings or next((old.settings for old in others if old.settings), None),
        progress=msgspec.structs.replace(mine.progress, shards=tuple(shards)),
    )


def _rooms(word: Word, memory: Tensor) -> Iterator[Tensor]:
    """The tensors of a word's parts, where they lie in the memory."""
    offset = 0
    for told in word.parts:
        dtype = dtype_called(told.dtype)
        nbytes: Bytes = numel_of(told.part) * dtype.itemsize
        yield memory[offset : offset + nbytes].view(dtype).view(shape_of(told.part))
        offset += nbytes
