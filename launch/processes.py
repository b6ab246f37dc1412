"""What Linux says of the processes of this machine: which there are, their state and their environment."""

import os
from pathlib import Path


def every_pid() -> list[int]:
    """All processes that this one may see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_fields(pid: int) -> list[str]:
    """State, parent and all that follows in proc(5)'s ``stat``; nothing where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def environment(pid: int) -> list[bytes]:
    """``NAME=value`` of a process as it began; nothing where it is gone or not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
