"""Which errors say that another rank is gone, and not that something is wrong here."""

import torch.distributed as dist

from ..errors import ArachneError

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


def first_line(error: BaseException) -> str:
    """Of its text."""
    return str(error).partition("\n")[0] or type(error).__name__
