"""Counts the bytes of tensors that exist at once on one device, and remembers the most.

On CUDA that is the allocator's figure and costs nothing. On a CPU, whose memory no allocator of torch counts,
it is found at the dispatcher: each operation's results are looked at, and forgotten when their storage goes.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..units import Bytes


@dataclass(slots=True)
class Peak:
    """The most bytes that were alive at once; known when the counting has ended."""

    bytes: Bytes = 0


@contextmanager
def peak_of(device: torch.device, held: Callable[[], Iterable[Tensor]]) -> Iterator[Peak]:
    """Find the peak of what runs inside; ``held`` gives the tensors that are there before (for a CPU)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    with _Counter(device) as counter:
        counter.see(list(held()))
        yield peak
    peak.bytes = counter.peak_bytes


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the results of every operation; storages are counted once, however many tensors view them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], Bytes]] = {}
        self._now = 0
        self.peak_bytes: Bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(_is_special(kind) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a tensor of tensors (DTensor): asked again with those that it holds
        result = function(*args, **(kwargs or {}))
        self.see(result)
        return result

    def see(self, results: Any) -> None:
        """Count what is new in a tree of results."""
        if isinstance(results, Tensor):
            if results.device.type == self._device and not _is_special(type(results)):
                self._count(results.untyped_storage())
        elif isinstance(results, tuple | list):
            for result in results:
                self.see(result)

    def _count(self, storage: UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[1] == size:
            return
        held = known[0] if known is not None else weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = held, size
        self._now += size - (known[1] if known is not None else 0)
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _forget(self, key: int) -> None:
        _, size = self._alive.pop(key)
        self._now -= size


def _is_special(kind: type[Tensor]) -> bool:
    """Whether tensors of this class say for themselves what operations on them do, as fakes and DTensors."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
