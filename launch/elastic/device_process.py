"""The process of one device of an elastic job: how it is started, named and looked at."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from arachne_runtime.membership.messages import Member

from ..processes import stat_fields

TOKEN_VARIABLE = "ARACHNE_TOKEN_FD"
"""Descriptor from which the process reads the job's token, to its end."""
MEMBER_VARIABLE = "ARACHNE_MEMBER_FD"
"""Descriptor to which it writes its incarnation and a newline once it has one."""
_NAME_BYTES = 256
"""More than an incarnation has."""


@dataclass(slots=True)
class DeviceProcess:
    """A child of this process, which alone may wait for it."""

    device: str
    process: "subprocess.Popen[bytes]"
    exit_descriptor: int
    """Readable once it has ended."""
    _named: int
    _name: bytes = b""
    num_stopped: int = 0
    """Looks in a row that found it stopped."""
    was_stopped: bool = False
    """It was killed for that."""

    @classmethod
    def start(
        cls, device: str, command: tuple[str, ...], environment: Mapping[str, str], token: str
    ) -> "DeviceProcess":
        """Start it; from a thread that outlives it, for the kernel kills it when that thread ends."""
        secret, named, name = _filled(token), *os.pipe()
        os.set_blocking(named, False)
        found = {**os.environ, **environment, TOKEN_VARIABLE: str(secret), MEMBER_VARIABLE: str(name)}
        words = [sys.executable, "-P", "-u", "-m", "launch.worker", *command]
        try:
            process = subprocess.Popen(words, env=found, stdin=subprocess.DEVNULL, pass_fds=(secret, name))
        except BaseException:
            os.close(named)
            raise
        finally:
            os.close(secret)
            os.close(name)
        try:
            ended = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            os.close(named)
            raise
        return cls(device, process, ended, named)

    @property
    def member(self) -> Member | None:
        """As it named itself; None: not yet."""
        if not self._name.endswith(b"\n"):
            with suppress(BlockingIOError):
                self._name += os.read(self._named, _NAME_BYTES)
        if not self._name.endswith(b"\n"):
            return None
        return Member(device=self.device, incarnation=self._name.decode().strip())

    def is_stopped(self) -> bool:
        """State T, by a signal; "t" is a debugger's."""
        return stat_fields(self.process.pid)[:1] == ["T"]

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still lives."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def close(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait()
        os.close(self.exit_descriptor)
        os.close(self._named)
        return code


def _filled(text: str) -> int:
    """The reading end of a pipe that holds a short text and its end."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return reader
