"""Logs in-place writes to tensors by storage, whichever way they come (``nn.init``, ``.data``, ``copy_``)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Write:
    """One in-place operation with its plain arguments; tensors among them are known only by their shape."""

    operation: str
    arguments: tuple[object, ...]
    reads_tensor: bool


class WriteLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, every in-place write to a tensor on one type of device is noted by storage.

    A clone of a tensor inherits its history, since a copied layer is initialised as its original was.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._writes: dict[int, list[Write]] = {}
        self._kept: list[torch.UntypedStorage] = []

    def of(self, tensor: Tensor) -> tuple[Write, ...]:
        """The writes to the storage of ``tensor``, oldest first."""
        return tuple(self._writes.get(_key(tensor), ()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for target in _targets(func, args, kwargs):
            if target.device.type != self._device_type:
                continue
            self._history(target).append(_write(func, target, (*args, *kwargs.values())))
        if func.overloadpacket in _COPIES and self.of(args[0]):
            self._history(result)[:] = self.of(args[0])
        return result

    def _history(self, tensor: Tensor) -> list[Write]:
        if _key(tensor) not in self._writes:
            self._kept.append(tensor.untyped_storage())  # an address that is kept cannot name another storage
        return self._writes.setdefault(_key(tensor), [])


_COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            yield from (item for item in values if isinstance(item, Tensor))


def _write(func: Any, target: Tensor, values: Iterable[Any]) -> Write:
    others = [value for value in values if value is not target]
    plain = tuple(tuple(v.shape) if _is_tensor(v) else repr(v) for v in others if not _is_generator(v))
    return Write(str(func), plain, any(_is_tensor(v) for v in others))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator)
