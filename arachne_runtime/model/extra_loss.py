"""Losses that a block adds by itself, say for an even load of its experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from ..errors import ModelError

_FOUND: ContextVar[list[Tensor] | None] = ContextVar("arachne_extra_losses", default=None)


def add_loss(value: Tensor) -> None:
    """Add ``value`` to the loss that is trained; for use inside the ``forward`` of a block, on any stage.

    The engine weighs it by the rows that the block was given, adds it to what it differentiates and to the
    loss that it reports, so that every plan trains the same sum. Outside an engine it does nothing, unless
    ``extra_losses`` listens.

    Args:
        value: One number: the mean over the samples that the block was given, of something that each sample
            has by itself. (A mean over tokens of all samples together would depend on the split.)

    Raises:
        ModelError: ``value`` is no tensor of one number.

    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(
            f"add_loss(value) takes one number, the mean over the samples of a block; got {what}"
        )
    found = _FOUND.get()
    if found is not None:
        found.append(value.reshape(()))


@contextmanager
def extra_losses() -> Iterator[list[Tensor]]:
    """The losses that blocks add inside, for a training loop without an engine.

    with arachne.extra_losses() as added:
        output = model(x)
    loss = loss_fn(output, y) + sum(added)

    """
    found: list[Tensor] = []
    token = _FOUND.set(found)
    try:
        yield found
    finally:
        _FOUND.reset(token)
