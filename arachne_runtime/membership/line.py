"""A thread that connects to the coordinator again and again, sends what it is told, hands on what comes."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from ..units import Seconds
from .channel import HANDSHAKE_S, HEADER_BYTES, client_context, frame, frame_length, keep_alive
from .messages import (
    MAX_INBOUND_BYTES,
    MAX_OUTBOUND_BYTES,
    Ended,
    Inbound,
    MessageError,
    Outbound,
    Refused,
    decode_outbound,
    encode_inbound,
)

RETRY_S: Seconds = 0.1
"""Between two attempts to connect; a coordinator that was restarted waits 5 s for all."""


class Line:
    """An open line, until `close` or a refusal.

    What is said while there is no connection is lost: ``opening`` gives the first messages of each
    connection, with all that still counts. ``heard`` takes each message. Both are called in the line's thread
    and must not block.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        opening: Callable[[], Iterable[Inbound]],
        heard: Callable[[Outbound], None],
        *,
        beat: Inbound | None = None,
        beat_s: Seconds = 0.1,
    ) -> None:
        self.fault = "not connected yet"
        """Why there is no connection; empty while there is one."""
        self._address = address
        self._context = client_context(token)
        self._opening = opening
        self._heard = heard
        self._beat = beat
        self._beat_s = beat_s
        self._writer: asyncio.StreamWriter | None = None
        self._said = 0
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._connect_always())
        self._thread = threading.Thread(target=self._run, name="coordinator-line", daemon=True)
        self._thread.start()

    def say(self, message: Inbound) -> None:
        """Send it soon, from any thread; nothing is sent once it is closed."""
        with suppress(RuntimeError):  # the loop is closed: by us, or by a refusal or an end, at any moment
            self._loop.call_soon_threadsafe(self._write, message)

    def close(self) -> None:
        """Send what was said, and end the thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _connect_always(self) -> None:
        while not self._is_over:
            try:
                await self._connect()
            except (OSError, EOFError, ssl.SSLError, MessageError) as error:
                self.fault = str(error) or type(error).__name__
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        reader, writer = await self._opened()
        self._writer, self._said = writer, 0
        beats = None
        try:
            for message in self._opening():
                self._write(message)
            if self._beat is not None:
                beats = asyncio.create_task(self._beat_always(self._beat))
            await self._read(reader)
        finally:
            if beats is not None:
                beats.cancel()
            self._writer = None
            writer.close()
            with suppress(OSError, ssl.SSLError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()
            writer.transport.abort()

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """In two steps: asyncio leaves the socket open where both at once are cancelled (Python 3.11)."""
        host, port = self._address
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                keep_alive(writer.get_extra_info("socket"))
                await writer.start_tls(self._context)
            except BaseException:
                writer.transport.abort()
                raise
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        last = 0
        while True:
            header = await reader.readexactly(HEADER_BYTES)
            content = await reader.readexactly(frame_length(header, MAX_OUTBOUND_BYTES))
            last, message = decode_outbound(content, after=last)
            self.fault = ""  # in TLS 1.3 only the first word shows that the coordinator took our token
            self._is_over = self._is_over or isinstance(message, Refused | Ended)  # it would be said again
            self._heard(message)

    async def _beat_always(self, beat: Inbound) -> None:
        while True:
            self._write(beat)
            await asyncio.sleep(self._beat_s)

    def _write(self, message: Inbound) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._said += 1
            self._writer.write(frame(encode_inbound(self._said, message), MAX_INBOUND_BYTES))
