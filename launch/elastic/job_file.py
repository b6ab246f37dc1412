"""Where an elastic job is found on its machine: a file in a private folder, beside the job's own folder."""

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.plan.document import Document

from ..lab.state import start_ticks


class JobFile(Document, frozen=True, kw_only=True):
    """How to reach a job's coordinator."""

    name: str
    pid: int
    """Of the command that runs it."""
    started: int
    """Start time of that process in clock ticks since boot: tells it from a later one with the same id."""
    place: str
    """Whose process ids those are, see `_place`."""
    address: tuple[str, int]
    """The coordinator's."""
    token_file: str
    journal: str

    def runs(self) -> bool:
        """Whether its command lives."""
        return start_ticks(self.pid) == self.started

    @property
    def token(self) -> str:
        """The job's secret."""
        return Path(self.token_file).read_text()


@contextmanager
def job_folder(model: str) -> Iterator[Path]:
    """A folder of this user's alone for one job, named after its model; it vanishes at the end."""
    words = "".join(c if c.isalnum() else "-" for c in model).strip("-") or "job"
    folder = jobs_folder() / f"{words[:40]}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        _file_of(folder).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def write_job_file(folder: Path, address: tuple[str, int], token_file: Path, journal: Path) -> JobFile:
    """Beside the job's folder, readable by its owner alone, whole or not at all."""
    started = start_ticks(os.getpid())
    assert started is not None
    job = JobFile(
        name=folder.name,
        pid=os.getpid(),
        started=started,
        place=_place(),
        address=address,
        token_file=str(token_file),
        journal=str(journal),
    )
    scratch = folder / "job.json"
    write_secret(scratch, msgspec.json.encode(job))
    scratch.replace(_file_of(folder))
    return job


def write_secret(path: Path, content: bytes) -> None:
    """A new file that nobody else can ever have opened."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def running_jobs() -> dict[str, JobFile]:
    """Elastic jobs of this user on this machine, by name; what dead ones left is removed."""
    found = {}
    for path in sorted(jobs_folder().glob("*.json")):
        try:
            job = msgspec.json.decode(path.read_bytes(), type=JobFile)
        except (OSError, msgspec.MsgspecError):
            continue
        if job.place != _place():  # of another container or machine that has this folder as well
            continue
        if job.runs():
            found[job.name] = job
        else:
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    return found


def find_job(name: str | None) -> JobFile:
    """The job of that name, or the only one.

    Raises UsageError where several run, UnsupportedEnvironmentError where none is it.
    """
    jobs = running_jobs()
    if name is None and len(jobs) == 1:
        return next(iter(jobs.values()))
    if name is None and jobs:
        raise UsageError(f"{len(jobs)} elastic jobs run here; name one: {', '.join(jobs)}")
    if name is None:
        raise UnsupportedEnvironmentError(
            "no elastic job of this user runs on this machine; start one: arachne run --elastic"
        )
    if name not in jobs:
        raise UnsupportedEnvironmentError(
            f"no elastic job {name!r} runs on this machine; running: {', '.join(jobs) or 'none'}"
        )
    return jobs[name]


def jobs_folder() -> Path:
    """``$XDG_RUNTIME_DIR/arachne``, else a folder of this user's under the temporary one; made if missing."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "arachne" if runtime else Path(tempfile.gettempdir()) / f"arachne-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UnsupportedEnvironmentError(
            f"{folder}: no folder for jobs can be made there ({error.strerror}); set XDG_RUNTIME_DIR"
        ) from error
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not is_ours:
        raise UnsupportedEnvironmentError(
            f"{folder} is not a folder of this user's alone; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def _place() -> str:
    """The boot of this machine and its process ids, which containers count anew."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _file_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")
