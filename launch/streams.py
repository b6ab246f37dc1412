"""What ranks print, through pipes, and the folders in which they leave their errors; knows no torch.

torch's own redirection goes through growing files that are read ten times a second; a pipe passes a line on
at once and leaves nothing behind. ``launch.worker`` opens its end.
"""

import json
import os
import re
import selectors
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from .worker import ERR_VARIABLE, ERROR_VARIABLE, OUT_VARIABLE

OUT, ERR = "out", "err"
ERROR_FILE = "error.json"
_TAIL_LINES = 12
"""Lines of a rank's standard error kept for a failure that left no other word."""
_POLL_S = 0.05
_CHUNK_BYTES = 65_536
LONGEST_LINE_BYTES = 65_536
"""A longer line is passed on in parts: it may never end."""
_LINE_END = re.compile(rb"\r?\n|\r+(?![\r\n]|\Z)")
"""A lone carriage return too, but not before it is known what follows."""
_ERR_LOCK = threading.Lock()
"""Of standard error alone: a reader of standard output that has paused must not keep a word back."""


@dataclass(slots=True)
class _Stream:
    """One pipe from one rank."""

    prefix: str
    shown_on: TextIO | None
    log: IO[str] | None
    reader: int
    writer: int
    rest: bytes = b""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def take(self, data: bytes) -> None:
        """Pass on whole lines, and those that a progress bar overwrites; keep the rest till its line ends."""
        *lines, self.rest = _LINE_END.split((self.rest + data).lstrip(b"\r"))
        if len(self.rest) > LONGEST_LINE_BYTES:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            self.put(line.decode(errors="replace") + "\n")

    def put(self, text: str) -> None:
        """Keep and pass on one line; what cannot be written must not stop the ranks, who wait on the pipe."""
        self.tail.append(text.rstrip())
        if self.log is not None and (fault := written(self.log, text)):
            written(sys.stderr, f"arachne: {self.log.name} ends here: {fault.strerror}\n")
            self._end_log()
        if self.shown_on is not None and written(self.shown_on, self.prefix + text):
            self.shown_on = None

    def close(self) -> None:
        if self.rest:
            self.put(self.rest.decode(errors="replace") + "\n")
        os.close(self.reader)
        os.close(self.writer)
        self._end_log()

    def _end_log(self) -> None:
        if self.log is not None:
            with suppress(OSError):
                self.log.close()
        self.log = None


def written(stream: IO[str], text: str) -> OSError | None:
    """Write to the end; what kept it from it: a full disk, a reader that has left.

    On standard error words of several threads stay whole.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with _ERR_LOCK if stream is sys.stderr else nullcontext():
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except OSError as error:
            return error
    return None


class RankStreams:
    """Gives each rank its error file and its output; a context manager around the launch."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        prefixed: bool,
        quiet: bool = False,
        log_dir: Path | None = None,
        appends: bool = False,
    ) -> None:
        """``appends``: to what is in ``log_dir``."""
        self._folder = folder
        self._log_mode = "a" if appends else "w"
        self._names = names
        self._direct = not prefixed and not quiet and log_dir is None
        self._log_dir = log_dir
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._prefixed = prefixed
        self._quiet = quiet
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "RankStreams":
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        if not self._direct:
            for name in self._names:
                for kind, shown_on in ((OUT, sys.stdout), (ERR, sys.stderr)):
                    self._streams[name, kind] = self._open(name, kind, shown_on)
            self._thread = threading.Thread(target=self._pump, name="rank-output", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def variables(self, name: str) -> dict[str, str]:
        """Where a rank that is about to start writes; errors and last words of one before it are gone."""
        folder = self._folder_of(name)
        folder.mkdir(exist_ok=True)
        for left in folder.iterdir():
            left.unlink()
        found = {ERROR_VARIABLE: str(folder / ERROR_FILE)}
        for kind, variable in ((OUT, OUT_VARIABLE), (ERR, ERR_VARIABLE)):
            if stream := self._streams.get((name, kind)):
                stream.tail.clear()
                found[variable] = f"/proc/{os.getpid()}/fd/{stream.writer}"
        return found

    def tail(self, name: str) -> tuple[str, ...]:
        """The last lines of a rank's standard error; none where it went straight to the terminal."""
        stream = self._streams.get((name, ERR))
        return tuple(stream.tail) if stream else ()

    def error(self, name: str) -> dict[str, Any]:
        """What a rank that has ended wrote down of its error; empty where it could not."""
        try:
            found = json.loads((self._folder_of(name) / ERROR_FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def keep_traceback(self, name: str) -> str | None:
        """The file of the log folder with the whole traceback of a failed rank; None where there is none."""
        written = self._folder_of(name) / "traceback.txt"
        if self._log_dir is None or not written.exists():
            return None
        kept = self._log_dir.absolute() / f"{_file_name(name)}.traceback"
        try:
            kept.write_bytes(written.read_bytes())
        except OSError:  # a full disk must not hide why the rank failed
            return None
        return str(kept)

    def _folder_of(self, name: str) -> Path:
        return self._folder / _file_name(name)

    def _open(self, name: str, kind: str, shown_on: TextIO) -> _Stream:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        prefix = f"[{name}] " if self._prefixed else ""
        path = self._log_dir / f"{_file_name(name)}.{kind}" if self._log_dir else None
        log = path.open(self._log_mode, encoding="utf-8") if path else None
        return _Stream(prefix, None if self._quiet else shown_on, log, reader, writer)

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in self._streams.values():
                selector.register(stream.reader, selectors.EVENT_READ, stream)
            while True:
                ended = self._ended.is_set()
                ready = selector.select(0 if ended else _POLL_S)
                for key, _ in ready:
                    key.data.take(os.read(key.data.reader, _CHUNK_BYTES))
                if ended and not ready:
                    break
        for stream in self._streams.values():
            stream.close()


def _file_name(name: str) -> str:
    """A colon in a file's name is a host's to many tools."""
    return f"rank-{name.replace(':', '-')}"
