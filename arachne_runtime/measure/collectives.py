"""Where tensor-parallel and expert groups say that they communicate, in the middle of an action.

    with collective("experts all_to_all", sent_bytes=rows.nbytes):
        dist.all_to_all_single(...)

Outside of a recorded step it costs a look-up and writes nothing. An autograd function keeps ``recording()``
in its forward and passes it to ``collective`` in its backward, which on CUDA runs in another thread.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from ..plan.records import RecordKind
from ..units import Bytes

_NOTHING: AbstractContextManager[None] = nullcontext()


class Timer(Protocol):
    """The part of the engine's records that a collective needs."""

    def timed(self, kind: RecordKind, name: str, *, sent_bytes: Bytes = 0) -> AbstractContextManager[None]:
        """Record how long the body waits."""
        ...


_CURRENT: ContextVar[Timer | None] = ContextVar("recording", default=None)


def recording() -> Timer | None:
    """What records the step that is under way; None where nothing does."""
    return _CURRENT.get()


def collective(name: str, *, sent_bytes: Bytes, to: Timer | None = None) -> AbstractContextManager[None]:
    """Record the body as one collective of this rank, ``to`` what records the step (default: looked up).

    ``name`` says group and operation: ``tensor all_reduce``, ``experts all_to_all``.
    """
    timer = to or _CURRENT.get()
    return _NOTHING if timer is None else timer.timed(RecordKind.COLLECTIVE, name, sent_bytes=sent_bytes)


@contextmanager
def recorded_by(timer: Timer) -> Iterator[None]:
    """Inside, collectives are told to ``timer``."""
    token = _CURRENT.set(timer)
    try:
        yield
    finally:
        _CURRENT.reset(token)
