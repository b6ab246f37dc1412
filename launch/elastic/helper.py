"""A process that serves an elastic job: started with a leash, read line by line, ended with certainty."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from arachne_runtime.errors import UnsupportedEnvironmentError
from arachne_runtime.units import Bytes, Seconds

from ..rank_environment import search_path

LONGEST_LINE_BYTES: Bytes = 4 * 2**20
"""Of what it says; a rank's line has 64 KiB at most, a failure some more."""
_TAIL_LINES = 10


@dataclass(slots=True)
class Helper:
    """Its standard input is its leash: it ends when that closes, even if this process is killed."""

    name: str
    process: asyncio.subprocess.Process
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], *, says_port: bool = False, first: bytes = b""
    ) -> "Helper":
        """``first`` goes to its standard input; ``says_port``: see `port`."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if says_port else None,
            stderr=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE_BYTES,
            env={**os.environ, **search_path()},
            start_new_session=True,  # Ctrl-C reaches the command alone, which lets go
        )
        found = cls(name, process)
        found.say(first)
        return found

    def say(self, text: bytes) -> None:
        """A line to its standard input, if it still lives."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(text)

    async def port(self) -> int:
        """Its first word; UnsupportedEnvironmentError with its complaint where it ends before."""
        assert self.process.stdout is not None
        text = await self.process.stdout.readline()
        if not text.strip().isdigit():
            await self.listen(lambda line: None)
            raise UnsupportedEnvironmentError(await self.complaint())
        return int(text)

    async def listen(self, heard: Callable[[str], object]) -> int:
        """Every line of its standard error to its end; its exit code.

        One of which ``heard`` gives False is none for a person.
        """
        while text := await self._line():
            line = text.decode(errors="replace")
            if heard(line) is not False:
                self.tail.append(line.rstrip())
        return await self.process.wait()

    async def _line(self) -> bytes:
        """The next of its standard error; words in the place of one that is too long; nothing at the end."""
        assert self.process.stderr is not None
        try:
            return await self.process.stderr.readline()
        except ValueError:  # asyncio has dropped what it held of it
            return f"{self.name}: a line of more than {LONGEST_LINE_BYTES} bytes is left out\n".encode()

    @property
    def was_killed(self) -> bool:
        """Whether somebody else ended it: any other signal is of its own making."""
        return self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    async def complaint(self) -> str:
        """How it ended, and what it said last."""
        code = await self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if self.was_killed:  # it is not what it said that ended it
            return f"{self.name} {how}"
        return "\n".join([f"{self.name} {how}", *(f"  {line}" for line in self.tail)])

    async def end(self, patience_s: Seconds) -> None:
        """Drop the leash and wait; what does not end is killed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), patience_s)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def module(name: str, *words: str) -> list[str]:
    """What runs a module of ours."""
    return [sys.executable, "-P", "-u", "-m", name, *words]


async def end_all(helpers: Sequence[Helper], patience_s: Seconds) -> None:
    """All at the same time."""
    await asyncio.gather(*(helper.end(patience_s) for helper in helpers))
