"""What a person sees while long work goes on: on a terminal only, nothing in a file or a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner


def bar(console: Console, *, transient: bool = False) -> Progress:
    """A bar with its description and the time so far; ``transient``: gone when the work is done."""
    columns = (TextColumn("{task.description:<46}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def line_of(file: Path, waiting: str) -> Iterator[None]:
    """A spinner before the line that another process keeps in ``file``; ``waiting`` until there is one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with Live(_Line(file, waiting), console=console, refresh_per_second=4, transient=True):
        yield


class _Line:
    """Reads the file whenever the terminal is redrawn."""

    def __init__(self, file: Path, waiting: str) -> None:
        self._file = file
        self._waiting = waiting

    def __rich__(self) -> Spinner:
        try:
            text = self._file.read_text()
        except OSError:
            text = self._waiting
        return Spinner("dots", text=text)
