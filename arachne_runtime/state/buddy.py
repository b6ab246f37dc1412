"""Copies of every rank's state in the memory of two nodes, for the loss of the last holder of a block.

Each rank copies what it holds to host memory every few steps, and sends that to its buddy in the background,
on a group of its own. A copy counts when all ranks have their own and those that were sent to them; only then
the one before is let go. So the processes that live can go back to one same step.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine import Engine
from ..errors import LostStateError
from ..measure.together import Together
from ..units import Bytes, Seconds
from .buddies import Buddies, Room, free_bytes
from .feeds import Feeds
from .holdings import holdings
from .job import RandomState
from .old import Old
from .packed import Packed, joined, packed, unpacked
from .words import Word

T = TypeVar("T")

CHUNK_BYTES: Bytes = 16 * 2**20
"""Of one message in the background, behind which one of a step may wait: 160 ms of a link of 100 MB/s."""
LEAVE_S: Seconds = 0.2
"""How long a copy may still take to notice that its group is broken."""
_STATES_TO_COME = 2
"""Of each element, before the first step has made them: as Adam has."""
_HEADER = 2
"""Numbers ahead of a copy: bytes of what is no tensor, and of the tensors."""
_NO_COPY, _BROKEN = 1, 2
"""What a rank says before a copy: it could not make one, or the last one broke the group."""


@dataclass(slots=True)
class Copy:
    """The state of a job when so many steps were done, as far as this process keeps it."""

    num_steps: int
    packs: list[Packed]
    """Its own, then those of the ranks whose buddy it is."""
    is_whole: bool = False
    """Whether this process has all that it is to keep."""


@dataclass(slots=True)
class Snapshots:
    """What one process keeps, through all generations that it lives in."""

    every: int
    """Steps from one to the next."""
    break_group: Callable[[dist.ProcessGroup], None]
    """Makes what all processes have under way in a group fail."""
    _kept: list[Copy] = field(default_factory=list)
    """The newest that counts, and the one that is being written; ascending."""
    _buddies: Buddies | None = None
    _group: dist.ProcessGroup | None = None
    _thread: threading.Thread | None = None
    _is_due: bool = False
    """Whether nothing was copied in this generation."""
    _fault: Exception | None = None
    """Of what was written in the background: the group is broken."""
    _anew: Callable[[], None] = lambda: None
    """Forms the group."""

    def enter(
        self,
        engine: Engine,
        node: str,
        timeout_s: Seconds,
        guard: Callable[[dist.ProcessGroup], None] = lambda group: None,
    ) -> tuple[dist.ProcessGroup, ...]:
        """Choose buddies among the processes of the default group; all of them call it in a new generation.

        Args:
            engine: Says how much there is to keep.
            node: Where this process runs.
            timeout_s: How long forming the group, and what is under way in it, may wait.
            guard: Told of the group, and of one that takes the place of a broken one.

        Returns:
            The group of the copies, which a watch should break with the others; none in a job of one process.

        """
        together = Together.of_default_group(engine.device)
        nbytes = sum(each.tensor.nbytes for each in holdings(engine))
        nbytes *= 1 if engine.num_steps else 1 + _STATES_TO_COME
        mine = Room(node=node, nbytes=nbytes, free_bytes=free_bytes() + self._own_bytes())
        rooms = [
            msgspec.msgpack.decode(each, type=Room) for each in together.gather(msgspec.msgpack.encode(mine))
        ]
        self._buddies, self._fault, self._is_due = Buddies.of(rooms), None, True
        if self._buddies is None and together.rank == 0:
            warnings.warn(
                "no snapshots: two copies of each rank's state, here and on another rank, do not fit into "
                "the memory of the hosts; the loss of the last holder of a block goes back to a checkpoint",
                stacklevel=2,
            )
        if together.size > 1 and self._buddies is not None:
            self._anew = partial(self._form, timeout_s, guard)
            self._anew()
        return (self._group,) if self._group is not None else ()

    def _form(self, timeout_s: Seconds, guard: Callable[[dist.ProcessGroup], None]) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        guard(self._group)

    def before_step(self, engine: Engine, feeds: Feeds) -> None:
        """Copy the state where it is time, alike on all ranks; ``feeds`` keeps what came since the oldest.

        The first step of a generation has one too: from then on others hold the last copy of a part. Random
        states go along only where the model draws: else what a script draws between steps would be drawn
        twice, though the script itself does not go back.
        """
        if self._is_due or engine.num_steps % self.every == 0:
            old = Old.of(engine, feeds=feeds.positions())
            if engine.recipe.stochastic:
                old = replace(old, random=RandomState.here(engine.device))
            self.take(old, Together.of_default_group(engine.device))
        feeds.forget(min((copy.num_steps for copy in self._kept), default=engine.num_steps))

    def take(self, old: Old, together: Together) -> None:
        """Copy the state between two steps, and send it while training goes on; all ranks take the same ones.

        It first waits until the last copy counts, which bounds what is kept to two. A process that is alone
        keeps none: nobody could go back to it. Where a rank fails, all go without this copy, and try again
        at the next.
        """
        self._join()
        self._is_due = False
        if self._buddies is None:
            return
        if self._group is None:
            self._kept.clear()
            return
        if (pack := self._packed(old, together)) is None:
            return
        copy = Copy(old.progress.num_steps, [pack])
        self._kept.append(copy)
        self._thread = threading.Thread(
            target=self._spread, args=(copy, self._group, self._buddies), name="snapshot", daemon=True
        )
        self._thread.start()

    def _packed(self, old: Old, together: Together) -> Packed | None:
        """None on all ranks where any has no memory, or failed in the background: that broke the group."""
        fault, pack = self._fault, None
        if fault is None:
            try:
                pack = packed(old)
            except Exception as error:
                fault = error
        mine = _BROKEN if self._fault is not None else _NO_COPY if fault is not None else 0
        worst = together.largest(mine)
        if not worst:
            return pack
        why = fault if fault is not None else "another rank could not copy"
        warnings.warn(f"the snapshot before stays the newest: {why}", stacklevel=2)
        self._fault = None
        self._kept = [copy for copy in self._kept if copy.is_whole]
        if worst == _BROKEN and (broken := self._group) is not None:
            self._anew()
            dist.destroy_process_group(broken)
        return None

    def leave(self) -> None:
        """The generation has ended, and its groups are broken or all ranks have finished: let go of them.

        A copy in the middle of a send does not notice that: gloo lets what is half written wait until the
        group's time limit (docs/negative-results.md). It is left alone, and counts for nothing.
        """
        self.ends_within(LEAVE_S)
        self._thread = None
        self._kept = [copy for copy in self._kept if copy.is_whole]
        if self._group is not None:
            with suppress(ValueError):  # with the default group it is gone already
                dist.destroy_process_group(self._group)
        self._group = self._buddies = None

    def ends_within(self, timeout_s: Seconds) -> bool:
        """Whether no copy is under way any more, after that time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def candidates(self, together: Together) -> tuple[int, ...]:
        """Steps done at the copies that any process has, newest first; all call it.

        A newer copy may be whole on some only, and one that joined or counted it has no older one: whether
        what all have of a step is all of the state shows as they try.

        Raises:
            LostStateError: On every process, where there is none.

        """
        mine = [copy.num_steps for copy in self._kept if copy.is_whole]
        told = together.gather(msgspec.msgpack.encode(mine))
        found = {step for each in told for step in msgspec.msgpack.decode(each, type=list[int])}
        if not found:
            raise LostStateError("no snapshot is whole on any process that lives; load a checkpoint")
        return tuple(sorted(found, reverse=True))

    def old(self, num_steps: int) -> Old | None:
        """What this process has of the state at that step, for itself and for others; None: nothing."""
        mine = [copy for copy in reversed(self._kept) if copy.num_steps == num_steps and copy.is_whole]
        packs = [pack for copy in mine for pack in copy.packs]
        return joined([unpacked(pack) for pack in packs]) if packs else None

    def go_back(self, num_steps: int) -> None:
        """The job is at that step again: later copies are of steps that are yet to come."""
        self._kept = [copy for copy in self._kept if copy.num_steps <= num_steps]

    def wait(self) -> bool:
        """Until the copy under way counts; whether it does."""
        self._join()
        return len(self._kept) == 1 and self._kept[0].is_whole

    def _own_bytes(self) -> Bytes:
        return sum(each.memory.nbytes for copy in self._kept for each in copy.packs)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _count(self, copy: Copy) -> None:
        """It is whole everywhere: no process will go back further."""
        copy.is_whole = True
        self._kept = [copy]

    def _spread(self, copy: Copy, group: dist.ProcessGroup, buddies: Buddies) -> None:
        """Send, receive, and meet; what fails leaves the copy before as it is."""
        try:
            rank = dist.get_rank(group)
            copy.packs += exchanged(copy.packs[0], group, buddies.of_rank[rank], buddies.wards(rank))
            copy.is_whole = True
            dist.barrier(group)
            if self._thread is threading.current_thread():  # else its generation is over
                self._count(copy)
        except Exception as error:
            if self._thread is not threading.current_thread():
                return
            self._fault = error
            self.break_group(group)  # others would wait for this process


def exchanged(mine: Packed, group: dist.ProcessGroup, buddy: int, wards: Sequence[int]) -> list[Packed]:
    """Send a copy to the buddy and receive those of some ranks; all ranks of the group do so at once."""
    meta = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine.word)), dtype=torch.uint8)
    header = torch.tensor([meta.nbytes, mine.memory.nbytes])
    sending = [dist.isend(each, group=group, group_dst=buddy) for each in (header, meta)]
    sending += [dist.isend(each, group=group, group_dst=buddy) for each in _chunks(mine.memory)]
    found = [_received(group, ward) for ward in wards]
    for work in sending:
        if work is not None:
            work.wait()
    return found


def _received(group: dist.ProcessGroup, source: int) -> Packed:
    header = torch.empty(_HEADER, dtype=torch.int64)
    dist.recv(header, group=group, group_src=source)
    meta, memory = (torch.empty(int(length), dtype=torch.uint8) for length in header)
    for each in (meta, *_chunks(memory)):
        dist.recv(each, group=group, group_src=source)
    return Packed(msgspec.msgpack.decode(bytes(meta.numpy()), type=Word), memory)


def _chunks(memory: Tensor) -> Iterator[Tensor]:
    return (memory[start : start + CHUNK_BYTES] for start in range(0, memory.numel(), CHUNK_BYTES))


def go_on_or_back(
    change: Callable[[Old | None], T], old: Old | None, snapshots: Snapshots, together: Together
) -> tuple[T, int | None]:
    """Change by the state of now, or, where a part of that is lost, by the newest snapshot that has it.

    Args:
        change: ``replan`` or ``bring``, from what a process has; all processes of ``together`` call it.
        old: What this process has now; None: nothing.
        snapshots: Where it goes back to; those of a process that joins are empty.
        together: The processes of the default group.

    Returns:
        The change, and how many steps were done at the snapshot; None where none was needed. The caller takes
        the data back (``Feeds.go_back``) and trains on what came since once more (``Feeds.since``).

    Raises:
        LostStateError: On every process, where no snapshot has the part either.

    """
    with suppress(LostStateError):  # alike on all
        return change(old), None
    names: tuple[str, ...] = ()
    for num_steps in snapshots.candidates(together):
        try:
            found = change(snapshots.old(num_steps))
        except LostStateError as error:  # alike on all
            names = error.names
            continue
        snapshots.go_back(num_steps)
        return found, num_steps
    raise LostStateError("no snapshot has all of the state; load a checkpoint", names)
