"""What a running lab leaves on disk for the ranks that enter it, and for who sweeps up after a dead one."""

import os
import stat
import tempfile
from pathlib import Path

import msgspec

from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document

from ..processes import stat_fields

LAB_VARIABLE = "ARACHNE_LAB"
"""Environment variable with the path of a lab's state file."""
STATE_FILE = "state.json"


class Seat(Document, frozen=True, kw_only=True):
    """Where a rank of one device goes before it runs."""

    device: str
    """``node:index``."""
    share: float
    cgroup: str | None = None
    """Folder of its CPU quota."""
    roster: str | None = None
    """Folder in which it leaves its process id for the stop/continue supervisor."""
    network: str | None = None
    """File of its network namespace."""


class LabState(Document, frozen=True, kw_only=True):
    """A running lab."""

    owner: int
    """Process id of the lab."""
    started: int
    """Start time of that process in clock ticks since boot: tells it from a later one with the same id."""
    seats: tuple[Seat, ...]
    cluster: Cluster
    """The same devices as a planner sees them."""
    environment: dict[str, str] = {}  # noqa: RUF012 - msgspec copies mutable defaults
    """What each rank's environment needs."""
    address: str = "127.0.0.1"
    """Where ranks reach the process that starts them."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of its devices, in the order of the lab."""
        return tuple(seat.device for seat in self.seats)

    def seat(self, device: str) -> Seat:
        """The seat of a device; UsageError where the lab has none of that name."""
        for seat in self.seats:
            if seat.device == device:
                return seat
        raise UsageError(f"the lab has no device {device!r}; its devices are {', '.join(self.devices)}")


def read_state(path: Path) -> LabState:
    """The state of a running lab; UsageError where the file is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LabState)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{LAB_VARIABLE}={path} is no running lab ({error}); start one: arachne lab"
        ) from error


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def is_alive(state: LabState) -> bool:
    """Whether the lab's own process still runs."""
    return start_ticks(state.owner) == state.started


def labs_folder() -> Path:
    """Where this user's labs keep their states; UnsupportedEnvironmentError where another user could write.

    What lies there names processes to kill and groups to remove.
    """
    folder = Path(tempfile.gettempdir()) / f"arachne-lab-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022 or not stat.S_ISDIR(found.st_mode):
        raise UnsupportedEnvironmentError(
            f"{folder} must be a folder that only you may write; remove it, or set TMPDIR"
        )
    return folder
