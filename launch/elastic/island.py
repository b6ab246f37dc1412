"""Runs the processes of one node of an elastic job, one a device; one that ends leaves its siblings alone.

``python -m launch.elastic.island`` reads `Orders` from its standard input, then what comes after an exit.
That input is its leash: when it closes, whoever ended, every process here ends. No torch is loaded.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from arachne_runtime.membership.client import AgentClient
from arachne_runtime.membership.messages import Member
from arachne_runtime.units import Seconds

from .. import lab
from ..failure import Failure, read_failure
from ..hosts import interface_of
from ..rank_environment import RUN_VARIABLE, on_cpus, search_path
from ..streams import RankStreams, written
from ..survivors import SHUTDOWN_S, no_survivors
from ..worker import DEVICE_VARIABLE
from .device_process import DeviceProcess
from .words import (
    LEFT_OUT_CODE,
    WORD_MARK,
    Again,
    Dismiss,
    Gone,
    Noticed,
    Orders,
    Told,
    read_order,
    read_orders,
)
from .words import line as line_of

STOPPED_S: Seconds = 1.0
"""A process in state T for so long is told of and killed; counted in looks, while the island itself runs."""
_LOOK_S: Seconds = 0.25
_LAST_WORDS_S: Seconds = 0.1
"""From an exit to its report: what the process wrote last is read twenty times a second."""
_READ_BYTES = 65_536


class Island:
    """The event loop of one node. `main` is the way in."""

    def __init__(self, orders: Orders, streams: RankStreams, agent: AgentClient, rest: bytes = b"") -> None:
        """``rest``: what of standard input was read behind the orders."""
        self._orders = orders
        self._streams = streams
        self._agent = agent
        self._rest = rest
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._running: dict[str, DeviceProcess] = {}
        self._dismissed: set[str] = set()
        self._stays = True
        """Whether processes are started still."""
        self._looks = not _supervised(orders)

    async def run(self) -> None:
        """Until the leash goes, or all have left after a notice."""
        self._loop.add_signal_handler(signal.SIGTERM, self._notice)
        self._loop.add_reader(0, self._hear)
        look = self._loop.create_task(self._look_always())
        for device in self._orders.ranks:
            self._start(device)
        self._obey()
        await self._over.wait()
        look.cancel()
        self._loop.remove_reader(0)

    def _start(self, device: str) -> None:
        if not self._stays or device in self._running or device in self._dismissed:
            return
        try:
            started = DeviceProcess.start(
                device, self._orders.command, self._environment(device), self._orders.token
            )
        except OSError as error:  # no memory, process or descriptor is left
            self._tell_not_started(device, error)
            return
        self._running[device] = started
        self._loop.add_reader(started.exit_descriptor, self._ended, started)

    def _environment(self, device: str) -> dict[str, str]:
        orders = self._orders
        return {
            **search_path(),
            **({} if _has_gpus() else on_cpus()),
            **_interface(orders),
            **orders.environment,
            **self._streams.variables(device),
            DEVICE_VARIABLE: device,
            RUN_VARIABLE: orders.run,
            "ARACHNE_COORDINATOR": _text(orders.coordinator),
            "ARACHNE_STORE": _text(orders.store),
        }

    def _tell_not_started(self, device: str, error: OSError) -> None:
        rank, where = self._orders.ranks[device], f"device {device}"
        words = [f"no process can be started: {error}"]
        failure = read_failure(rank, where, os.EX_OSERR, time.time(), {}, words)
        tell(Gone(device=device, code=os.EX_OSERR, failure=failure))

    def _ended(self, one: DeviceProcess) -> None:
        """Told at once: to the coordinator first, whom the survivors wait for."""
        self._loop.remove_reader(one.exit_descriptor)
        member, code = one.member, one.close()
        if member is not None:
            self._agent.exited(member, code)
        self._loop.call_later(_LAST_WORDS_S, self._tell_end, one, member, code)

    def _tell_end(self, one: DeviceProcess, member: Member | None, code: int) -> None:
        del self._running[one.device]
        incarnation = member.incarnation if member is not None else None
        failure = self._failure(one, code) if code not in (0, LEFT_OUT_CODE) else None
        tell(Gone(device=one.device, incarnation=incarnation, code=code, failure=failure))
        if not self._stays and not self._running:
            self._over.set()

    def _failure(self, one: DeviceProcess, code: int) -> Failure:
        told, tail = self._streams.error(one.device), self._streams.tail(one.device)
        rank, where = self._orders.ranks[one.device], f"device {one.device}"
        failure = read_failure(rank, where, code, time.time(), told, tail)
        kept = self._streams.keep_traceback(one.device)
        return msgspec.structs.replace(failure, stopped=one.was_stopped, traceback_file=kept)

    async def _look_always(self) -> None:
        while self._looks:
            await asyncio.sleep(_LOOK_S)
            for one in self._running.values():
                self._look(one)

    def _look(self, one: DeviceProcess) -> None:
        one.num_stopped = one.num_stopped + 1 if one.is_stopped() else 0
        if one.num_stopped * _LOOK_S > STOPPED_S and not one.was_stopped:
            if (member := one.member) is not None:
                self._agent.stopped(member)
            one.was_stopped = True
            one.send(signal.SIGKILL)

    # ---- what is asked of it

    def _hear(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._loop.remove_reader(0)
            self._end()
        self._rest += data
        self._obey()

    def _obey(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for text in lines:
            match read_order(text):
                case Again(device=device, after_s=after_s):
                    self._loop.call_later(after_s, self._start, device)
                case Dismiss(device=device):
                    self._dismiss(device)

    def _dismiss(self, device: str) -> None:
        self._dismissed.add(device)
        if device in self._running:
            self._running[device].send(signal.SIGKILL)
        else:  # it would have started soon
            tell(Gone(device=device, code=0))

    def _notice(self) -> None:
        """Each process says so and trains on until it is left out of the plan."""
        if self._stays:
            tell(Noticed(node=self._orders.node))
            self._leave(signal.SIGTERM, self._orders.notice_s)

    def _end(self) -> None:
        self._leave(signal.SIGINT, SHUTDOWN_S)

    def _leave(self, number: signal.Signals, patience_s: Seconds) -> None:
        self._stays = False
        for one in self._running.values():
            one.send(number)
            one.send(signal.SIGCONT)  # one that is stopped could not heed it
        self._loop.call_later(patience_s, self._kill)
        if not self._running:
            self._over.set()

    def _kill(self) -> None:
        for one in self._running.values():
            one.send(signal.SIGKILL)


def tell(word: Told) -> None:
    """Say it to the command; one that was killed hears nothing any more."""
    written(sys.stderr, WORD_MARK + line_of(word).decode())


def main() -> None:
    """Orders, then the island to its end; nothing that it started outlives it."""
    text, _, rest = _first_line().partition(b"\n")
    orders = read_orders(text)
    log_dir = Path(orders.log_dir) if orders.log_dir is not None else None
    with ExitStack() as held:
        _leave_to_the_command()
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="arachne-island-")))
        streams = RankStreams(
            scratch, list(orders.ranks), prefixed=True, log_dir=log_dir, appends=orders.is_again
        )
        held.enter_context(streams)
        held.enter_context(no_survivors(f"{RUN_VARIABLE}={orders.run}".encode()))
        agent = held.enter_context(AgentClient(orders.coordinator, orders.token, orders.node))
        asyncio.run(_run(orders, streams, agent, rest))


async def _run(orders: Orders, streams: RankStreams, agent: AgentClient, rest: bytes) -> None:
    await Island(orders, streams, agent, rest).run()


def _first_line() -> bytes:
    """Orders, and what came with them; the island ends where nobody gives any."""
    found = b""
    while b"\n" not in found:
        if not (data := os.read(0, _READ_BYTES)):
            sys.exit("no orders: an island is started by `arachne run --elastic`")
        found += data
    return found


def _leave_to_the_command() -> None:
    """Signals of a terminal: the command ends this by its leash. Processes do not inherit such a handler."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def _supervised(orders: Orders) -> bool:
    """Whether a lab's duty cycle stops processes on purpose."""
    state = lab.current()
    return state is not None and any(state.seat(device).roster for device in orders.ranks)


def _interface(orders: Orders) -> dict[str, str]:
    """Which interface gloo takes, unless the user has said so."""
    found = interface_of(orders.address) if orders.address is not None else None
    variable = "GLOO_SOCKET_IFNAME"
    return {} if found is None or variable in os.environ else {variable: found}


def _has_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


if __name__ == "__main__":
    main()
