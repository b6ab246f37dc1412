"""Takes a rank out of collectives that a lost peer left unfinished, and forms the groups of the survivors.

A direct peer of a killed rank sees a connection error in 35 ms; every other rank would wait for the time
limit of the group. On gloo neither `abort` nor `shutdown` nor `destroy_process_group` of another thread
unblocks it; a receive that runs into its own time limit does: gloo then closes all connections of the group.
"""

import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import UnsupportedEnvironmentError
from ..units import Seconds
from .messages import Freeze

UNUSED_TAG = 2**30 - 1
"""No message of the engine has it: gloo's tags are 32 bits wide, ours count from 0."""
BREAK_S: Seconds = 0.001
"""Time limit of the receive that nobody answers."""


def break_group(group: dist.ProcessGroup) -> None:
    """Make every unfinished operation of a group fail, here and at its peers, from any thread of this rank.

    Raises UnsupportedEnvironmentError for another backend than gloo: none of them was tried.
    """
    if (backend := dist.get_backend(group)) != dist.Backend.GLOO:
        raise UnsupportedEnvironmentError(f"a group of {backend} cannot be broken yet; use gloo")
    size = dist.get_world_size(group)
    if size > 1:
        peer = (dist.get_rank(group) + 1) % size
        with suppress(RuntimeError):  # that it fails is its purpose
            work = dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=UNUSED_TAG)
            if work is not None:
                work.wait(timedelta(seconds=BREAK_S))


def form_world(
    store: Store,
    generation: int,
    rank: int,
    num_ranks: int,
    *,
    form_s: Seconds,
    timeout_s: Seconds,
    purpose: str = "",
) -> dist.ProcessGroup:
    """The default group of a generation, apart in the store from that of any other, or other purpose.

    ``form_s`` bounds the forming, in which nothing can be broken; ``timeout_s`` every later operation. Raises
    RuntimeError where a peer does not come.
    """
    limit = timedelta(seconds=form_s)
    meeting = PrefixStore(f"generation-{generation}{purpose and '-'}{purpose}", store)
    # torch numbers groups, meets under the number, and starts again only as it destroys a world: a rank that
    # failed to form one would look for its peers under another number than they, for ever (torch 2.13)
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=limit)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    world = dist.group.WORLD
    assert world is not None
    return world


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout_s: Seconds) -> None:
    """Of every later operation of groups that were formed under another limit."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def leave_world() -> None:
    """Destroy the default group and what hangs on it. Call it outside the `except` block of the error.

    The traceback of the error keeps works of the group alive. A rank may report before: once a group is
    broken nothing of it changes the rank. No garbage is collected here, which takes 0.09 s of CPU time in a
    process with torch (one core, 2026-11-30): the connections are closed already.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


class Watch:
    """A thread that breaks the groups of a generation as soon as the coordinator says so.

    `on_stop` is for `MemberClient`; a planned change breaks nothing, since all ranks stop by themselves.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stopped = 0
        self._generation = 0
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="group-watch", daemon=True)
        self._thread.start()

    def on_stop(self, stop: object) -> None:
        """A generation must end; where that comes before its groups are there, they break as they come."""
        if isinstance(stop, Freeze):
            with self._changed:
                self._stopped = max(self._stopped, stop.generation)
                self._changed.notify_all()

    def guard(self, generation: int, groups: Iterable[dist.ProcessGroup]) -> None:
        """These are the groups of this rank from now on."""
        with self._changed:
            self._generation, self._groups = generation, tuple(groups)
            self._changed.notify_all()

    def break_all(self) -> None:
        """Break what is guarded: this rank has failed, and its peers may wait for it."""
        with self._changed:
            self._break()

    def release(self) -> None:
        """Let go of the groups, before they are destroyed; returns when none of them is being broken."""
        with self._changed:
            self._groups = ()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed, self._groups = True, ()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if self._groups and self._stopped >= self._generation:
                    self._break()
                self._changed.wait()

    def _break(self) -> None:
        groups, self._groups = self._groups, ()
        for group in groups:
            with suppress(Exception):  # destroyed meanwhile, or half so; those behind it must break too
                break_group(group)
