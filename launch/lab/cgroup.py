"""CPU quotas by control group, version 1 or 2: a device gets ``share`` of a core in every period."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arachne_runtime.errors import UnsupportedEnvironmentError

PERIOD_US = 10_000
"""Period of a quota: with 10 ms the compute times of proportional shares agree within 4 % (measured)."""
MIN_QUOTA_US = 1_000
"""Least quota that the kernel takes; smaller shares get a longer period."""


@dataclass(frozen=True, slots=True)
class Quota:
    """CPU time that a group may use in each period."""

    quota_us: int
    period_us: int

    @classmethod
    def of(cls, share: float) -> "Quota":
        """The quota for a share of one core: 10 ms periods where the quota is then at least 1 ms."""
        period = max(PERIOD_US, round(MIN_QUOTA_US / share))
        return cls(max(MIN_QUOTA_US, round(share * period)), period)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder of the CPU controller in which groups can be made."""

    version: int
    folder: Path

    def limit(self, group: Path, quota: Quota) -> None:
        """Write a quota into a group."""
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota.quota_us} {quota.period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(quota.period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota.quota_us))

    def prefer(self, group: Path) -> None:
        """Serve a group before all others, so that a busy machine does not slow its devices further."""
        if self.version == 2:
            (group / "cpu.weight").write_text("10000")
        else:
            (group / "cpu.shares").write_text("262144")

    def delegate(self, group: Path) -> None:
        """Let groups be made inside ``group``."""
        if self.version == 2:
            (group / "cgroup.subtree_control").write_text("+cpu")


def find_hierarchy(mounts: str, membership: str) -> Hierarchy:
    """The CPU controller's folder, from the texts of ``/proc/self/mountinfo`` and ``/proc/self/cgroup``.

    Version 1: this process's own group. Version 2: the nearest group above it that gives CPU to its children
    (a group with processes cannot). UnsupportedEnvironmentError where there is no controller.
    """
    own = {
        tuple(c.split(",")): path for _, c, path in (line.split(":", 2) for line in membership.splitlines())
    }
    for kind, controllers, root, folder in _cgroup_mounts(mounts):
        if kind == "cgroup" and "cpu" in controllers:
            path = next((path for names, path in own.items() if "cpu" in names), "/")
            return Hierarchy(1, _below(folder, root, path))
    for kind, _, root, folder in _cgroup_mounts(mounts):
        if kind == "cgroup2" and "cpu" in _words(folder / "cgroup.controllers"):
            return Hierarchy(2, _giver(_below(folder, root, own.get(("",), "/")), folder))
    raise UnsupportedEnvironmentError("no CPU controller is mounted below /sys/fs/cgroup")


def own_hierarchy() -> Hierarchy:
    """The hierarchy of this process."""
    return find_hierarchy(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def create(hierarchy: Hierarchy, name: str, shares: Sequence[float]) -> tuple[Path, ...]:
    """Groups ``name/0``, ``name/1``, ... with a quota for each share; on failure none is left."""
    top = hierarchy.folder / name
    groups = tuple(top / str(i) for i in range(len(shares)))
    try:
        top.mkdir()
        hierarchy.prefer(top)
        hierarchy.delegate(top)
        for group, share in zip(groups, shares, strict=True):
            group.mkdir()
            hierarchy.limit(group, Quota.of(share))
    except OSError as error:
        remove((*groups, top))
        raise UnsupportedEnvironmentError(
            f"no CPU quota below {hierarchy.folder}: {error.strerror}"
        ) from error
    return groups


def remove(groups: Sequence[Path], timeout_s: float = 5.0) -> None:
    """Kill what still runs in the groups and remove them, innermost first; a group that is gone is fine."""
    stop_at = time.monotonic() + timeout_s
    for group in groups:
        while group.exists():
            _kill_members(group)
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() > stop_at:
                    raise UnsupportedEnvironmentError(
                        f"{group} cannot be removed: {error.strerror}"
                    ) from error
                time.sleep(0.01)


def enter(group: Path) -> None:
    """Move this process, with all its threads, into a group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _kill_members(group: Path) -> None:
    for pid in _words(group / "cgroup.procs"):
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _cgroup_mounts(mounts: str) -> Iterator[tuple[str, list[str], str, Path]]:
    """Kind, options, root and folder of every mounted hierarchy (proc(5), mountinfo)."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            yield kind, options.split(","), fields[3], Path(fields[4])


def _below(folder: Path, root: str, path: str) -> Path:
    """Folder of a group whose mount shows only what is below ``root`` (as in a container)."""
    inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else "/"
    own = folder / inside.lstrip("/")
    return own if own.is_dir() else folder


def _giver(own: Path, top: Path) -> Path:
    """The nearest group from ``own`` up to ``top`` that gives CPU to its children, or can be told to."""
    for group in (own, *own.parents):
        if _gives_cpu(group) or group == top:
            return group
    return top


def _gives_cpu(group: Path) -> bool:
    control = group / "cgroup.subtree_control"
    if "cpu" in _words(control):
        return True
    try:
        control.write_text("+cpu")
    except OSError:
        return False
    return "cpu" in _words(control)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
