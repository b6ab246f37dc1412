"""``arachne lab``: unequal devices on this machine for as long as a command runs."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from arachne_runtime.errors import UsageError

from ..lab import Enforcement, active, read_lab

PATIENCE_S = 10.0
"""How long the command may take to end after a signal to the lab before it is killed."""


def command(
    lab: Annotated[Path, typer.Argument(help="The lab (lab.toml).")],
    words: Annotated[
        list[str], typer.Argument(help="Behind --: the command to run once.", metavar="-- COMMAND")
    ],
    enforcement: Annotated[
        Enforcement, typer.Option("--enforce", help="How devices are held to their shares.")
    ] = Enforcement.AUTO,
) -> int:
    """Run a command with parts of this machine as devices.

    The command runs once; `arachne run` and `arachne profile` in it place rank i in the lab's device i.
    """
    found = read_lab(lab)
    with active(found, enforcement=enforcement) as on:
        for name, device in found.devices.items():
            print(f"lab: {name} {device.name}: {device.share:g} of a core", file=sys.stderr)
        for note in on.notes:
            print(f"lab: {note}", file=sys.stderr)
        return _run(words)


def _run(words: list[str]) -> int:
    """The command's exit code; Ctrl-C reaches it from the terminal, other signals are passed on."""
    parent = os.getpid()

    def die_with_lab() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    with _ctrl_c_left_to_the_command():
        try:
            process = subprocess.Popen(words, preexec_fn=die_with_lab)
        except OSError as error:
            raise UsageError(f"cannot run {words[0]!r}: {error.strerror}") from error
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                _end(process)
    return code if code >= 0 else 128 - code


@contextmanager
def _ctrl_c_left_to_the_command() -> Iterator[None]:
    """The terminal sends it to the command as well, which ends first.

    An exception here instead could come between the end of the command and the note of its exit code, which
    would be lost. A handler that does nothing is not inherited, as ignoring the signal would be.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
