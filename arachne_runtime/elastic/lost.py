"""Which errors say that another rank is gone, and not that something is wrong here."""

import torch.distributed as dist

from ..errors import ArachneError, ReplanError, UnsupportedEnvironmentError

_MARKS = (
    "gloo/transport/",
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
)
"""What gloo says where a connection or a wait ends (torch 2.13); they pass through autograd as they are."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch comes from a connection; a user's RuntimeError has no such words."""
    if isinstance(error, ArachneError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS)


def is_fault_of_another(error: BaseException) -> bool:
    """Whether a change of plan failed, and not by this process: who failed ends, the others go on.

    A fault here that comes from a connection is that of a peer. Processes that differ, each well by itself,
    would differ in the next generation too: that is nobody's fault.
    """
    if not isinstance(error, ReplanError) or not error.processes:
        return False
    return error.__cause__ is None or is_lost_peer(error.__cause__)


def is_own(error: BaseException) -> bool:
    """Whether an error is this rank's, or all ranks', whatever became of the others meanwhile.

    UnsupportedEnvironmentError may say that another rank could not write its part of a checkpoint.
    """
    if is_fault_of_another(error) or isinstance(error, UnsupportedEnvironmentError):
        return False
    return isinstance(error, ArachneError)


def first_line(error: BaseException) -> str:
    """Of its text."""
    return str(error).partition("\n")[0] or type(error).__name__
