"""Counts the bytes of tensors that exist at once on one device, and remembers the most.

On CUDA that is the allocator's figure and costs nothing. On a CPU, whose memory no allocator of torch counts,
it is found at the dispatcher: each operation's results are looked at, and forgotten when their storage goes.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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
    with counted(device, held) as count:
        yield peak
    peak.bytes = count.peak_bytes


class Count(Protocol):
    """Bytes of tensors on a device."""

    @property
    def now_bytes(self) -> Bytes:
        """Alive now."""
        ...

    @property
    def peak_bytes(self) -> Bytes:
        """Most that were alive at once since the start or the last ``restart``."""
        ...

    def restart(self) -> None:
        """Forget the peak."""
        ...


@contextmanager
def counted(device: torch.device, held: Callable[[], Iterable[Tensor]]) -> Iterator[Count]:
    """Count while the body runs; ``held`` gives the tensors that are there before (for a CPU)."""
    if device.type == "cuda":
        allocator = _Allocator(device)
        allocator.restart()
        yield allocator
        return
    with _Counter(device) as counter:
        counter.see(list(held()))
        yield counter


@dataclass(frozen=True, slots=True)
class _Allocator:
    """Torch's own figures."""

    device: torch.device

    @property
    def now_bytes(self) -> Bytes:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> Bytes:
        return torch.cuda.max_memory_allocated(self.device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the results of every operation; storages are counted once, however many tensors view them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], Bytes]] = {}
        self.now_bytes: Bytes = 0
        self.peak_bytes: Bytes = 0

    def restart(self) -> None:
        """Forget the peak."""
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(_is_special(kind) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a tensor of tensors (DTensor): asked again with those that it holds
        result = function(*args, **(kwargs or {}))
        self.see(result, args)
        return result

    def see(self, results: Any, given: Any = ()) -> None:
        """Count what is new in a tree of results; a view of something ``given`` was there before."""
        if isinstance(results, Tensor):
            if results.device.type == self._device and not _is_special(type(results)):
                self._count(results.untyped_storage(), given)
        elif isinstance(results, tuple | list):
            for result in results:
                self.see(result, given)

    def _count(self, storage: UntypedStorage, given: Any) -> None:
        key, size = id(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is None and any(storage is of for of in _storages(given)):
            return  # the caller's own, say a batch, seen through a view
        if known is not None and known[1] == size:
            return
        held = known[0] if known is not None else weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = held, size
        self.now_bytes += size - (known[1] if known is not None else 0)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, key: int) -> None:
        _, size = self._alive.pop(key)
        self.now_bytes -= size


def _storages(tree: Any) -> Iterator[UntypedStorage]:
    if isinstance(tree, Tensor):
        if not _is_special(type(tree)):
            yield tree.untyped_storage()
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _storages(item)


def _is_special(kind: type[Tensor]) -> bool:
    """Whether tensors of this class say for themselves what operations on them do, as fakes and DTensors."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
