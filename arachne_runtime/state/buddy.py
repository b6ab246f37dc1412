"""Copies of every rank's state in the memory of two nodes, for the loss of the last holder of a block.

Each rank copies what it holds to host memory every few steps, and sends that to its buddy in the background,
on a group of its own. A copy counts when all ranks have their own and those that were sent to them; only then
the one before is let go. So all processes that live can always go back to one same step.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine import Engine
from ..errors import LostStateError
from ..measure.together import Together
from ..units import Bytes
from .buddies import Buddies, Room, free_bytes
from .old import Old
from .packed import Packed, joined, packed, unpacked
from .replan import Change, Make, replan
from .words import Word

CHUNK_BYTES: Bytes = 16 * 2**20
"""Of one message in the background: larger ones would hold up those of a step that share the link."""
_HEADER = 2
"""Numbers ahead of a copy: bytes of what is no tensor, and of the tensors."""


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
    _kept: list[Copy] = field(default_factory=list)
    """The newest that counts, and the one that is being written; ascending."""
    _buddies: Buddies | None = None
    _group: dist.ProcessGroup | None = None
    _thread: threading.Thread | None = None

    def enter(self, nbytes: Bytes, node: str) -> tuple[dist.ProcessGroup, ...]:
        """Choose buddies among the processes of the default group; all of them call it in a new generation.

        Args:
            nbytes: Of what this process holds.
            node: Where it runs.

        Returns:
            The group of the copies, which a watch should break with the others; none in a job of one process.

        """
        together = Together.of_default_group()
        mine = Room(node=node, nbytes=nbytes, free_bytes=free_bytes() + self._own_bytes())
        rooms = [
            msgspec.msgpack.decode(each, type=Room) for each in together.gather(msgspec.msgpack.encode(mine))
        ]
        self._buddies = Buddies.of(rooms)
        if self._buddies is None and together.rank == 0:
            warnings.warn(
                "no snapshots: two copies of each rank's state, here and on another rank, do not fit into "
                "the memory of the hosts; the loss of the last holder of a block goes back to a checkpoint",
                stacklevel=2,
            )
        if together.size > 1 and self._buddies is not None:
            self._group = dist.new_group(backend="gloo")
        return (self._group,) if self._group is not None else ()

    def is_due(self, engine: Engine) -> bool:
        """Whether a copy is to be made before the next step; alike on all ranks."""
        return self._buddies is not None and engine.num_steps % self.every == 0

    def take(self, old: Old) -> None:
        """Copy the state between two steps, and send it while training goes on; all ranks take the same ones.

        It first waits until the last copy counts, which bounds what is kept to two.
        """
        self._join()
        if self._buddies is None:
            return
        self._kept.append(Copy(old.progress.num_steps, [packed(old)]))
        if self._group is None:
            self._count()
            return
        self._thread = threading.Thread(target=self._spread, name="snapshot", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """The generation has ended, and its groups are broken or all ranks have finished: let go of them."""
        self._join()
        self._kept = [copy for copy in self._kept if copy.is_whole]
        if self._group is not None:
            with suppress(ValueError):  # with the default group it is gone already
                dist.destroy_process_group(self._group)
        self._group = self._buddies = None

    def common(self, together: Together) -> int:
        """Steps done at the newest copy that all processes have, but for those that have none; all call it.

        Raises:
            LostStateError: On every process, where there is none.

        """
        mine = [copy.num_steps for copy in self._kept if copy.is_whole]
        told = [
            set(msgspec.msgpack.decode(each, type=list[int]))
            for each in together.gather(msgspec.msgpack.encode(mine))
        ]
        shared = set.intersection(*(each for each in told if each)) if any(told) else set()
        if not shared:
            raise LostStateError("no snapshot is whole on all processes that live; load a checkpoint")
        return max(shared)

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

    def _count(self) -> None:
        """The newest is whole everywhere: no process will go back further."""
        self._kept[-1].is_whole = True
        del self._kept[:-1]

    def _spread(self) -> None:
        """Send, receive, and meet; what fails leaves the copy before as it is."""
        group, buddies, copy = self._group, self._buddies, self._kept[-1]
        assert group is not None
        assert buddies is not None
        rank = dist.get_rank(group)
        with suppress(
            RuntimeError
        ):  # a group that breaks: the generation ends, for which others have the words
            copy.packs += exchanged(copy.packs[0], group, buddies.of_rank[rank], buddies.wards(rank))
            copy.is_whole = True
            dist.barrier(group)
            self._count()


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


def replan_or_go_back(
    old: Old | None,
    snapshots: Snapshots,
    make: Make,
    together: Together,
    node_of: Callable[[int], object],
) -> tuple[Change, int | None]:
    """Change the plan from the state of now, or, where a part of that is lost, from the newest snapshot.

    Returns:
        The change, and how many steps were done at the snapshot; None where none was needed. The caller takes
        the data back to ``change.heard.feeds``.

    Raises:
        LostStateError: On every process, where no snapshot has the part either.

    """
    try:
        return replan(old, make, together, node_of), None
    except LostStateError:
        pass  # alike on all; outside, so that nothing of it stays alive
    num_steps = snapshots.common(together)
    change = replan(snapshots.old(num_steps), make, together, node_of)
    snapshots.go_back(num_steps)
    return change, num_steps
