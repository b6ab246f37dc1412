"""The coordinator's sockets and clock: what they give goes into the state machine, what it wants is done."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from arachne_runtime.membership.channel import (
    HANDSHAKE_S,
    HEADER_BYTES,
    frame,
    frame_length,
    keep_alive,
    server_context,
)
from arachne_runtime.membership.messages import (
    MAX_INBOUND_BYTES,
    MAX_OUTBOUND_BYTES,
    MessageError,
    Outbound,
    decode_inbound,
    encode_message,
    number_outbound,
)
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from .actions import Action, Append, AskPlan, Drop, Log, Send
from .journal import Journal
from .machine import Machine
from .planner_words import SupersededError
from .settings import Settings
from .worth import Offer

PlanFor: TypeAlias = Callable[[tuple[str, ...], Plan | None], Offer | None]
"""Devices that are there and the running plan to an offer, or None where no plan fits; runs in a thread.

What it raises is logged, and it is asked again; at once after SupersededError, if anyone wants to know."""
Assume: TypeAlias = Callable[[Mapping[str, float]], None]
"""Devices that compute so many times longer than their profile says, for all questions that follow."""
TICK_S: Seconds = 0.05
"""A tenth of what makes a node suspect."""
FIRST_RETRY_S: Seconds = 1.0
"""After a planner that failed; doubled each time."""
LAST_RETRY_S: Seconds = 60.0
MAX_CONNECTIONS = 8192
"""Two for each of 4,096 devices; more are closed at once."""
BACKLOG = 1024
"""Connections that wait to be accepted: all come at once when a coordinator is started again."""
MAX_UNSENT_BYTES = 4 * MAX_OUTBOUND_BYTES
"""A peer that reads nothing is cut off when so much waits for it."""

_LOGGER = logging.getLogger(__name__)


class Server:
    """One coordinator process's event loop. `serve` is the way in."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        plan_for: PlanFor,
        token: str,
        assume: Assume = lambda slower: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._journal = journal
        self._plan_for = plan_for
        self._assume = assume
        self._context = server_context(token)
        self._machine = Machine(settings, journal.history, self._loop.time())
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._newest: tuple[Outbound | None, bytes] = None, b""
        """The last message and its bytes: many are told the same."""
        self._sent: dict[int, int] = {}
        """Number of the last message, by connection."""
        self._connections = 0
        self._fault: Exception | None = None
        """What ends this coordinator: a journal that cannot be written, or a bug of ours."""
        self._plans: set[asyncio.Task[None]] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    async def run(self, host: str, port: int, started: Callable[[int], None], stop: asyncio.Event) -> None:
        """Until ``stop`` is set; ``started`` is told the port."""
        server = await asyncio.start_server(self._accept, host, port, backlog=BACKLOG)
        started(server.sockets[0].getsockname()[1])
        try:
            while not stop.is_set():
                self._take(self._machine.tick)
                self._raise_fault()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), TICK_S)
        finally:
            server.close()
            for task in (*self._handlers, *self._plans):
                task.cancel()
            await asyncio.gather(*self._handlers, *self._plans, return_exceptions=True)
        self._raise_fault()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        peer = writer.get_extra_info("peername")
        try:
            if len(self._handlers) > MAX_CONNECTIONS:
                raise ConnectionRefusedError(f"{MAX_CONNECTIONS} connections are open")
            keep_alive(writer.get_extra_info("socket"))
            await writer.start_tls(self._context, ssl_handshake_timeout=HANDSHAKE_S)
            await self._listen(reader, writer, peer)
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError) as error:
            _LOGGER.warning("connection from %s closed: %s", peer, error or type(error).__name__)
        finally:
            self._handlers.discard(task)
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: object) -> None:
        """From here on the peer has shown that it holds the token."""
        self._connections += 1
        connection, last = self._connections, 0
        self._writers[connection], self._sent[connection] = writer, 0
        try:
            while header := await reader.read(HEADER_BYTES):
                header += await reader.readexactly(HEADER_BYTES - len(header))
                content = await reader.readexactly(frame_length(header, MAX_INBOUND_BYTES))
                try:
                    last, message = decode_inbound(content, after=last)
                except MessageError as error:
                    _LOGGER.warning("connection %d from %s: ignored: %s", connection, peer, error)
                    continue
                self._take(partial(self._machine.receive, connection, message))
        finally:
            del self._writers[connection], self._sent[connection]
            self._take(partial(self._machine.disconnect, connection))

    def _take(self, step: Callable[[Seconds], list[Action]]) -> None:
        """One step of the machine and all it wants; after an error nobody hears anything any more."""
        if self._fault is None:
            try:
                self._do(step(self._loop.time()))
            except Exception as error:
                self._fault = error

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Append(entry=entry):
                    self._journal.append(entry)
                case Send(connection=connection, message=message):
                    self._send(connection, message)
                case Drop(connection=connection):
                    if (writer := self._writers.get(connection)) is not None:
                        writer.close()
                case AskPlan(number=number, devices=devices, running=running, slower=slower):
                    self._assume(slower)
                    task = self._loop.create_task(self._plan(number, devices, running))
                    self._plans.add(task)
                    task.add_done_callback(self._plans.discard)
                case Log(text=text):
                    _LOGGER.info("%s", text)

    def _send(self, connection: int, message: Outbound) -> None:
        writer = self._writers.get(connection)
        if writer is None or writer.is_closing():
            return
        self._sent[connection] += 1
        if message is not self._newest[0]:
            self._newest = message, encode_message(message)
        content = number_outbound(self._sent[connection], self._newest[1])
        writer.write(frame(content, MAX_OUTBOUND_BYTES))
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            _LOGGER.warning("connection %d reads nothing: closed", connection)
            writer.transport.abort()

    async def _plan(self, number: int, devices: tuple[str, ...], running: Plan | None) -> None:
        """Until it is answered, or nobody wants the answer any more: an error says nothing of plans."""
        wait_s = FIRST_RETRY_S
        while True:
            try:
                offer = await asyncio.to_thread(self._plan_for, devices, running)
            except SupersededError:
                if not self._machine.wants(number):
                    return
                continue  # the newer question was the older one of ours, asked again
            except Exception:
                _LOGGER.exception("the planner failed; it is asked again in %g s", wait_s)
            else:
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_RETRY_S)
            if not self._machine.wants(number):
                return
        self._take(partial(self._machine.planned, number, offer))


async def serve(
    settings: Settings,
    journal_path: Path,
    plan_for: PlanFor,
    token: str,
    *,
    host: str,
    port: int = 0,
    started: Callable[[int], None] = lambda port: None,
    stop: asyncio.Event | None = None,
    assume: Assume = lambda slower: None,
) -> None:
    """Coordinate one job until ``stop`` is set. ``started`` is told the port it listens on.

    ``assume``: what is told of drifting devices, `Planner.assume`.

    Raises UsageError or InvalidFileError where the journal cannot be opened, UnsupportedEnvironmentError
    without the package cryptography, and OSError where the port is taken or the disk is full.
    """
    with _opened(journal_path) as journal:
        server = Server(settings, journal, plan_for, token, assume)
        await server.run(host, port, started, stop or asyncio.Event())


@contextmanager
def _opened(path: Path) -> Iterator[Journal]:
    journal = Journal.open(path)
    try:
        yield journal
    finally:
        journal.close()
