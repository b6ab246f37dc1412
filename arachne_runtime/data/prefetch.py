"""Brings batches to a rank's GPU one step ahead, so that copies run while the step before computes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from .batch import tensors_of, to_device
from .loader import LoadedRows

Handle = TypeVar("Handle")


class Lane(Protocol[Handle]):
    """Copies batches beside what computes."""

    def start(self, batch: LoadedRows) -> Handle:
        """Start copying a batch."""
        ...

    def finish(self, handle: Handle) -> LoadedRows:
        """The copy, as what is issued from now on may read it."""
        ...


def one_ahead(batches: Iterable[LoadedRows], lane: Lane[Handle]) -> Iterator[LoadedRows]:
    """The batches in their order; the copy of each has started before the one before it is given out."""
    waiting: list[Handle] = []
    for batch in batches:
        waiting.append(lane.start(batch))
        if len(waiting) > 1:
            yield lane.finish(waiting.pop(0))
    for handle in waiting:
        yield lane.finish(handle)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A batch on its way to the device."""

    batch: LoadedRows
    copied: torch.cuda.Event


class CudaLane:
    """Copies on a stream of its own; from pinned memory they need neither the host nor what computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: LoadedRows) -> _Copy:
        """Start copying; the allocator keeps pinned memory until its copy has ended."""
        with torch.cuda.stream(self._stream):
            pieces = tuple((rows, to_device(tree, self._device)) for rows, tree in batch.pieces)
        return _Copy(replace(batch, pieces=pieces), self._stream.record_event())

    def finish(self, handle: _Copy) -> LoadedRows:
        """Let the current stream wait for the copy; its memory is not reused before that stream is done."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(handle.copied)
        for _, tree in handle.batch.pieces:
            for tensor in tensors_of(tree):
                tensor.record_stream(stream)
        return handle.batch
