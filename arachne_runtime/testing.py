"""Run a function on N real gloo ranks and collect what each returns.

The processes are kept warm between calls (torch is imported once, in a fork server), so a call costs
milliseconds. Each call forms a fresh process group and destroys it. After a failure every process that took
part is replaced, so that nothing of it is left for the next call.
"""

import atexit
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UsageError, WorkerFailedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

_PRELOAD = ["torch.distributed", "torch._dynamo", __name__]
"""Imported once for all ranks; a first optimizer or meta tensor imports dynamo, which takes a second."""
GRACE_S = 3.0
"""How long the other ranks may still take to report once one of them has failed."""


def run_ranks(num_ranks: int, function: Callable[..., T], *args: Any, timeout_s: float = 60) -> list[T]:
    """Call ``function(*args)`` on ranks 0..num_ranks-1 of a fresh gloo process group; results by rank.

    ``function`` must be importable (defined at the top of a module), ``args`` and results picklable; a result
    travels as a copy. Raises WorkerFailedError with the rank and traceback of the first rank that failed, or,
    after ``timeout_s``, with the stacks of those that hang.
    """
    if num_ranks < 1:
        raise UsageError(f"run_ranks needs at least one rank, not {num_ranks}")
    try:
        payload = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"run_ranks sends {function!r} to processes: {error}; define it at module level"
        ) from error
    return _POOL.call(num_ranks, payload, timeout_s)


@dataclass(frozen=True, slots=True)
class _Task:
    """What a worker is told: one rank of one call."""

    payload: bytes
    rank: int
    num_ranks: int
    store_port: int
    store_prefix: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong on one rank."""

    rank: int
    text: str
    at_s: float
    """When, on the machine's monotonic clock: the first failure is the cause of the others."""


class _Worker:
    """One warm process and the pipe to it."""

    def __init__(self, index: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._stacks = tempfile.NamedTemporaryFile(prefix="arachne-stacks-")  # noqa: SIM115 - lives as long as we
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, self._stacks.name), name=f"arachne-rank-{index}"
        )
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """Where each thread of the process is now."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.1)
        return Path(self._stacks.name).read_text()

    def close(self, *, kill: bool) -> None:
        """End the process: at once, or by closing the pipe that it waits on."""
        self.pipe.close()
        if kill:
            self.process.kill()
        self.process.join(GRACE_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        self._stacks.close()


@dataclass(slots=True)
class _Pool:
    """Warm workers, one for each rank, and the store at which their groups meet."""

    workers: list[_Worker] = field(default_factory=list)
    store: "TCPStore | None" = None
    num_calls: int = 0

    def call(self, num_ranks: int, payload: bytes, timeout_s: float) -> list[Any]:
        """Run one task on each of the first ``num_ranks`` workers."""
        store = self._open_store()
        self.num_calls += 1
        while len(self.workers) < num_ranks:
            self.workers.append(_Worker(len(self.workers)))
        team = self.workers[:num_ranks]
        done = False
        try:
            for rank, worker in enumerate(team):
                prefix = f"call-{self.num_calls}"
                worker.pipe.send(_Task(payload, rank, num_ranks, store.port, prefix, timeout_s))
            results = _gather(team, timeout_s)
            done = True
        finally:
            if not done:
                self._drop(num_ranks)
        return results

    def close(self) -> None:
        """End every process."""
        while self.workers:
            self.workers.pop().close(kill=False)
        self.store = None

    def _open_store(self) -> "TCPStore":
        from torch._C._distributed_c10d import TCPStore

        if self.store is None:
            atexit.register(self.close)
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.store

    def _drop(self, num_workers: int) -> None:
        """Kill the first workers; the next call makes new ones."""
        team, self.workers = self.workers[:num_workers], self.workers[num_workers:]
        for worker in team:
            worker.close(kill=True)


_POOL = _Pool()


def _gather(team: Sequence[_Worker], timeout_s: float) -> list[Any]:
    """Results by rank; raises for the first failure, after a short wait for the words of the others."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    end = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(team):
        reported = {*results, *(failure.rank for failure in failures)}
        waiting = {worker.pipe: rank for rank, worker in enumerate(team) if rank not in reported}
        ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            answer = _receive(team[rank], rank)
            if isinstance(answer, _Failure):
                failures.append(answer)
                end = min(end, time.monotonic() + GRACE_S)
            else:
                results[rank] = answer[0]
    if failures:
        raise WorkerFailedError(_told(failures))
    hanging = [rank for rank in range(len(team)) if rank not in results]
    if hanging:
        stacks = "\n".join(f"rank {rank}:\n{team[rank].stacks()}" for rank in hanging)
        raise WorkerFailedError(
            f"rank {hanging} did not finish within {timeout_s:g} s; they are at\n{stacks}"
        )
    return [results[rank] for rank in range(len(team))]


def _receive(worker: _Worker, rank: int) -> tuple[Any] | _Failure:
    try:
        answer: tuple[Any] | _Failure = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(GRACE_S)
        code = worker.process.exitcode
        text = f"rank {rank}: the process died with exit code {code}\n{worker.stacks()}"
        return _Failure(rank, text, at_s=-math.inf)
    return answer


def _told(failures: Sequence[_Failure]) -> str:
    """The first failure in full, one line of each other."""
    first, *rest = sorted(failures, key=lambda failure: (failure.at_s, failure.rank))
    others = [failure.text.splitlines()[0] for failure in rest]
    return "\n".join([first.text, *(f"afterwards {line}" for line in others)])


def _serve(pipe: "connection.Connection[Any, Any]", stacks_path: str) -> None:
    """The life of a worker: one task after the other until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    with open(stacks_path, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        while True:
            try:
                task = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            _run(task, pipe)
            gc.collect()


def _run(task: _Task, pipe: "connection.Connection[Any, Any]") -> None:
    """Answer before the group goes: its end makes ranks that still work fail too."""
    try:
        with _process_group(task):
            try:
                function, args = pickle.loads(task.payload)
                answer = pickle.dumps((function(*args),))
            except BaseException as error:
                pipe.send_bytes(_failure(task.rank, error))
                return
            pipe.send_bytes(answer)
            with suppress(RuntimeError):  # a rank that failed has told so itself
                _meet()
    except BaseException as error:
        pipe.send_bytes(_failure(task.rank, error))


def _failure(rank: int, error: BaseException) -> bytes:
    text = f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    return pickle.dumps(_Failure(rank, text, time.monotonic()))


@contextmanager
def _process_group(task: _Task) -> Iterator[None]:
    """A fresh gloo group and fresh global state; the process is killed if it outlives its time by far."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    signal.setitimer(signal.ITIMER_REAL, task.timeout_s + 2 * GRACE_S)
    timeout = timedelta(seconds=task.timeout_s)
    store = TCPStore("127.0.0.1", task.store_port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(task.store_prefix, store),
        rank=task.rank,
        world_size=task.num_ranks,
        timeout=timeout,
    )
    _meet()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _meet() -> None:
    """Wait for all: a group that goes while another rank still connects, or receives, fails that rank."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
