"""Runs an elastic job from one command: a coordinator, a c10d store, and an island for each node.

The coordinator may be killed and comes back from its journal; an island that is lost comes back too.
"""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.membership.channel import new_token
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..coordinator.planner_words import Problem
from ..failure import NodeLostError
from ..hosts import Hosts
from ..nodes import NodeRanks, at_host, nodes_of
from ..rank_environment import RUN_VARIABLE
from ..survivors import SHUTDOWN_S, no_survivors
from .coordinating import Duties
from .course import Course
from .helper import Helper, end_all, module
from .job_file import job_folder, write_job_file, write_secret
from .ledger import Ledger
from .log import EventLog, show
from .words import WORD_MARK, Gone, Noticed, Orders, Told, line, read_told

LOOK_S: Seconds = 0.05
"""Between two looks into the journal."""
FIRST_PAUSE_S: Seconds = 0.5
LONGEST_PAUSE_S: Seconds = 60.0
"""Before a helper that ended by itself starts again: 0.5, 1, 2 .. 60 s, until one has lived for so long."""
MOST_STARTS = 4
"""One that ends so often in a row ends the job, but for the island of a node in a job that has trained."""
MOST_KILLS = 20
"""Of signals from outside in a row; from then on they count as well: memory may be short for good."""
END_S: Seconds = SHUTDOWN_S + 5.0
"""How long an island may take to end its processes, which have ``SHUTDOWN_S``."""
SSH_OPTIONS = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""A node that is cut off is given up by ssh after 15 s, and tried again; the coordinator needs 2 s for it."""
CHECKPOINT_S: Seconds = 60.0
"""How long processes may save and end once the first has done so, after the coordinator has ended the job."""
LAST_WORDS_S: Seconds = 5.0
"""After that end, for processes that are told of it and say more; then the job ends where none is left."""
SAVE_S: Seconds = 600.0
"""The same until the first: a checkpoint of a large model takes minutes."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """What is run."""

    plan: Plan
    """The first."""
    command: tuple[str, ...]
    """``train.py ARGS`` or ``-m module ARGS``."""
    host: str = "127.0.0.1"
    """Where the coordinator and the store listen."""
    min_devices: int = 1
    problem: Problem | None = None
    """For the planner; None: later plans are what is left of the first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None
    hosts: Hosts | None = None
    """Where its nodes are; None: all here."""

    def island_command(self, node: str) -> list[str]:
        """What runs the island of a node."""
        if self.hosts is None:
            return module("launch.elastic.island")
        return at_host(self.hosts.node[node], module("launch.elastic.island"), ssh_options=SSH_OPTIONS)

    def address(self, node: str) -> str | None:
        """By which the other nodes reach it; None: all are here."""
        return self.hosts.node[node].address if self.hosts is not None else None


class _SignalError(Exception):
    """A signal ends the job."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


def run_elastic(job: ElasticJob) -> None:
    """Run a job to its end; no process of it outlives the call.

    Raises RanksFailedError where a script is at fault, NoFeasiblePlanError where no plan fits what is left,
    NodeLostError where the coordinator, the store or an island cannot run, KeyboardInterrupt.
    """
    with job_folder(job.plan.model) as folder:
        try:
            asyncio.run(_run(job, folder))
        except _SignalError as error:
            stopped_by = error.number
        else:
            return
    if stopped_by is not signal.SIGINT:
        os.kill(os.getpid(), stopped_by)  # as if we had never caught it: the caller's handler decides
    raise KeyboardInterrupt


async def _run(job: ElasticJob, folder: Path) -> None:
    running = ElasticRun(job, folder)
    with _heeded(running.end):
        try:
            await _unless_ended(running.start(), running.result)
            await running.result
        finally:
            await running.close()


async def _unless_ended(start: Coroutine[None, None, None], result: "asyncio.Future[None]") -> None:
    """A signal need not wait for what serves the job to come up."""
    starting = asyncio.ensure_future(start)
    await asyncio.wait({starting, result}, return_when=asyncio.FIRST_COMPLETED)
    if not result.done():
        starting.result()
        return
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


class ElasticRun:
    """The event loop of one job's command."""

    def __init__(self, job: ElasticJob, folder: Path) -> None:
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._job = job
        self._folder = folder
        self._token = new_token()
        self._log = EventLog()
        self._ledger = Ledger(folder / "journal", self._log.entry)
        self._course = Course(job.plan.devices, self._ledger, self._log.say)
        self._ranks = {device: rank for rank, device in enumerate(job.plan.devices)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._helpers: dict[str, Helper] = {}
        """Those that serve all nodes, by name."""
        self._islands: dict[str, Helper] = {}
        """By node."""
        self._left: set[str] = set()
        """Nodes that were asked to leave."""
        self._store_port = self._port = 0
        self._is_closing = False

    async def start(self) -> None:
        """Everything that serves the job, and then its islands."""
        store = await Helper.start(
            "the c10d store", module("launch.elastic.store", self._job.host), says_port=True
        )
        self._helpers["store"] = store
        self._store_port = await store.port()
        self._port = await (await self._coordinator()).port()
        token_file = self._folder / "token"
        write_secret(token_file, self._token.encode())
        address = (self._job.host, self._port)
        found = write_job_file(self._folder, address, token_file, self._folder / "journal")
        self._log.say(f"job {found.name}: arachne status {found.name}")
        self._spawn(self._guard_store(store))
        self._spawn(self._keep_coordinator())
        self._spawn(self._follow())
        for node in nodes_of(self._job.plan):
            self._spawn(self._keep_island(node))

    def end(self, error: Exception | None = None) -> None:
        """The job is over."""
        self._log.is_quiet = True
        if self.result.done():
            return
        if error is None:
            self.result.set_result(None)
        else:
            self.result.set_exception(error)

    async def close(self) -> None:
        """End every process: islands first, which end the ranks."""
        self._log.is_quiet = self._is_closing = True
        await end_all(tuple(self._islands.values()), END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await end_all((*self._islands.values(), *self._helpers.values()), END_S)  # one may have just begun
        if self.result.done() and not self.result.cancelled():
            self.result.exception()  # it was seen, if only because `start` failed as well

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """An error of it ends the job."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # a bug of ours would leave the job without its keeper
                self.end(error)

        self._tasks.add(asyncio.get_running_loop().create_task(guarded()))

    # ---- what serves all nodes

    async def _coordinator(self) -> Helper:
        """A process of it; the next ones listen at the port of the first."""
        duties = Duties(
            plan=self._job.plan,
            journal=str(self._folder / "journal"),
            token=self._token,
            host=self._job.host,
            port=self._port,
            min_devices=self._job.min_devices,
            problem=self._job.problem,
        )
        first = msgspec.json.encode(duties) + b"\n"
        found = await Helper.start(
            "the coordinator", module("launch.elastic.coordinating"), says_port=True, first=first
        )
        self._helpers["coordinator"] = found
        return found

    async def _keep_coordinator(self) -> None:
        patience, helper = _Patience(), self._helpers["coordinator"]
        while True:
            await helper.listen(self._log.coordinator)
            if self.result.done():  # not before: ranks that end may still ask it
                break
            pause_s = patience.after(helper, how := await helper.complaint())
            self._log.say(f"{how}; it goes on from its journal in {pause_s:g} s, ranks train on meanwhile")
            await asyncio.sleep(pause_s)
            helper = await self._coordinator()

    async def _guard_store(self, store: Helper) -> None:
        await store.listen(show)
        raise NodeLostError(f"{await store.complaint()}\nwithout it no group can be formed again")

    async def _follow(self) -> None:
        while self._ledger.ended is None:
            self._ledger.refresh()
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LAST_WORDS_S)
        self._course.ended()
        self._judge(SAVE_S)

    # ---- nodes

    async def _keep_island(self, node: NodeRanks) -> None:
        patience, is_again = _Patience(), False
        while True:
            run = f"arachne-{secrets.token_hex(8)}"
            name, first = f"the island of node {node.name}", line(self._orders(node, run, is_again))
            is_again = True
            island = await Helper.start(name, self._job.island_command(node.name), first=first)
            self._islands[node.name] = island
            self._course.returned(node.devices)
            await island.listen(self._hear)
            del self._islands[node.name]
            await asyncio.to_thread(_sweep, run)
            self._course.lost(node.devices)
            if node.name in self._left or self._is_over():
                break
            begins = self._ledger.completed == 0
            pause_s = patience.after(island, how := await island.complaint(), may_give_up=begins)
            self._log.say(f"{how}; it starts again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            if self._is_over():
                break
        all_left = len(self._left) == len(nodes_of(self._job.plan))
        if all_left and not self._islands and not self._course.is_ending:
            self.end(NoFeasiblePlanError("every node has left the job"))
        self._judge()

    def _orders(self, node: NodeRanks, run: str, is_again: bool) -> Orders:
        return Orders(
            node=node.name,
            ranks={device: self._ranks[device] for device in node.devices},
            command=self._job.command,
            coordinator=(self._job.host, self._port),
            store=(self._job.host, self._store_port),
            token=self._token,
            run=run,
            environment=self._job.environment,
            address=self._job.address(node.name),
            log_dir=str(self._job.log_dir.absolute()) if self._job.log_dir is not None else None,
            is_again=is_again,
        )

    def _hear(self, text: str) -> bool:
        """A line of an island, and whether it is one of a rank; else it is a word for us."""
        if not text.startswith(WORD_MARK):
            show(text)
            return True
        try:
            word = read_told(text.removeprefix(WORD_MARK).encode())
        except msgspec.MsgspecError as error:
            self._log.say(f"a word of an island is left out, it cannot be read: {error}")
        else:
            self._obey(word)
        return False

    def _obey(self, word: Told) -> None:
        match word:
            case Noticed(node=node):
                self._left.add(node)
                self._log.say(f"node {node} was asked to leave (SIGTERM)")
            case Gone():
                for order in self._course.gone(word):
                    if island := self._islands.get(node_of(order.device)):
                        island.say(line(order))
                self._judge()

    def _is_over(self) -> bool:
        """Whether nothing is started again."""
        over = self._course.is_ending or self._course.error is not None or self._ledger.ended is not None
        return over or self.result.done() or self._is_closing

    def _judge(self, patience_s: Seconds = CHECKPOINT_S) -> None:
        """Whether that was the end; after an error of the job its processes may take so long."""
        course = self._course
        self._log.is_quiet = self._log.is_quiet or course.is_ending
        if course.is_over and (course.is_ending or course.error is not None):
            self.end(course.error)
        elif course.error is not None:
            asyncio.get_running_loop().call_later(patience_s, self.end, course.error)


@dataclass(slots=True)
class _Patience:
    """With a helper that ends again and again."""

    num_starts: int = 0
    num_kills: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def after(self, helper: Helper, complaint: str, *, may_give_up: bool = True) -> Seconds:
        """How long to wait before the next start; NodeLostError once it is of no use."""
        if time.monotonic() - self.began_s > LONGEST_PAUSE_S:
            self.num_starts = self.num_kills = 0
        if helper.was_killed and self.num_kills < MOST_KILLS:  # which says nothing of the next one
            self.num_kills += 1
            self.began_s = time.monotonic() + FIRST_PAUSE_S
            return FIRST_PAUSE_S
        self.num_starts += 1
        if self.num_starts >= MOST_STARTS and may_give_up:
            raise NodeLostError(complaint)
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (self.num_starts - 1), LONGEST_PAUSE_S)
        self.began_s = time.monotonic() + pause_s
        return pause_s


def _sweep(run: str) -> None:
    """End what an island left behind that could not do it itself."""
    with no_survivors(f"{RUN_VARIABLE}={run}".encode()):
        pass


@contextmanager
def _heeded(end: Callable[[Exception], None]) -> Iterator[None]:
    """Signals end the job; one that is ignored (nohup) stays so."""
    loop = asyncio.get_running_loop()
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in taken:
        loop.add_signal_handler(number, end, _SignalError(number))
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
