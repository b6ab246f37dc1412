"""The coordinator's journal: a file that only grows, on the disk before anyone hears of it."""

import fcntl
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from arachne_runtime.errors import InvalidFileError, Problem, UsageError

from .actions import Entry
from .history import History, HistoryError

_DECODER = msgspec.json.Decoder(Entry)


class Journal:
    """An open journal. Nobody else has it open to write, on this host."""

    def __init__(self, file: IO[bytes], history: History) -> None:
        self.history = history
        self._file = file

    @classmethod
    def open(cls, path: Path) -> "Journal":
        """Read and lock it; it is made where there is none. A last entry cut short by a crash is dropped.

        Raises InvalidFileError for any other fault, UsageError where another coordinator has it.
        """
        file = path.open("a+b")
        try:
            _lock(file, path)
            file.seek(0)
            content = file.read()
            whole = content.rfind(b"\n") + 1
            history = _replay(path, content[:whole])
            if whole < len(content):
                os.ftruncate(file.fileno(), whole)
            _sync_folder(path.parent)
        except BaseException:
            file.close()
            raise
        return cls(file, history)

    def append(self, entry: Entry) -> None:
        """Compare and set: only what follows the newest entry is written; HistoryError else."""
        history = self.history.after(entry)
        text = msgspec.json.encode(entry)
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.history = history

    def close(self) -> None:
        """Another coordinator may open it."""
        self._file.close()


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{path} is the journal of a coordinator that runs; end it, or name another"
        ) from error


def _replay(path: Path, content: bytes) -> History:
    history = History()
    for number, entry in enumerate(_entries(path, content), 1):
        try:
            history = history.after(entry)
        except HistoryError as error:
            raise InvalidFileError(str(path), [Problem(f"line {number}", str(error))]) from error
    return history


def _entries(path: Path, content: bytes) -> Iterator[Entry]:
    for number, line in enumerate(content.splitlines(), 1):
        check, _, text = line.partition(b" ")
        if check != b"%08x" % zlib.crc32(text):
            raise InvalidFileError(
                str(path), [Problem(f"line {number}", "was altered: its checksum differs")]
            )
        try:
            yield _DECODER.decode(text)
        except msgspec.DecodeError as error:
            raise InvalidFileError(str(path), [Problem(f"line {number}", str(error))]) from error


def _sync_folder(folder: Path) -> None:
    """A new file is only there after a crash if its folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
