"""What a rank does for the others when an out-of-memory error ends its script: they end too, told why."""

import atexit
import os
import sys
from contextlib import suppress
from threading import Timer
from typing import TYPE_CHECKING
from weakref import ref

import torch
import torch.distributed as dist

from ..errors import ExitCode
from ..units import Seconds

if TYPE_CHECKING:
    from .reducer import Reducer

PATIENCE_S: Seconds = 60.0
"""How long the others may take to come to the end of their step; a guess: some steps of a large model."""


def tell_others_at_exit(reducer: "Reducer") -> None:
    """Join the sums of the step that this rank leaves by an error, when Python ends."""
    atexit.register(_tell, ref(reducer))


def _tell(reference: "ref[Reducer]") -> None:
    reducer = reference()
    if reducer is None or not dist.is_initialized():
        return
    if isinstance(getattr(sys, "last_value", None), torch.OutOfMemoryError):
        end = Timer(PATIENCE_S, os._exit, (ExitCode.WORKER_FAILED,))
        end.daemon = True
        end.start()
        with suppress(Exception):  # what ended the script is printed already
            reducer.abandon(0)
        end.cancel()
