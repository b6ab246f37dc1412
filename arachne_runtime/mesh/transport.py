"""Messages between two ranks: gloo with tags on the world group, NCCL with a communicator a direction."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """Starts messages; each returns at once with the work to wait on."""

    matches_in_order: bool
    """Whether messages of a pair are matched by the order of their posts, so that tags mean nothing."""

    def send(self, tensor: Tensor, receiver: int, tag: int) -> dist.Work:
        """Start sending a contiguous tensor."""
        ...

    def receive(self, tensor: Tensor, sender: int, tag: int) -> dist.Work:
        """Start receiving into a contiguous tensor."""
        ...

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those that were made for it and that this rank is in."""
        ...

    def close(self) -> None:
        """Let go of them; the mesh destroys them."""
        ...


class GlooTransport:
    """Tagged messages on the default group; they may be received in any order."""

    matches_in_order = False

    def __init__(self, processes: Sequence[int]) -> None:
        """By rank of the plan, the number of its process in the group."""
        self._processes = processes

    def send(self, tensor: Tensor, receiver: int, tag: int) -> dist.Work:
        """Start sending; gloo reads the memory until the work has ended."""
        work = dist.isend(tensor, self._processes[receiver], tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, sender: int, tag: int) -> dist.Work:
        """Start receiving."""
        work = dist.irecv(tensor, self._processes[sender], tag=tag)
        assert work is not None
        return work

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """None: the default group is not its own."""
        return ()

    def close(self) -> None:
        """Nothing is held."""


class NcclTransport:
    """A communicator for each ordered pair, so that opposite messages never wait for one another.

    NCCL ignores tags and matches the messages of a communicator in order: both sides post in the total order.
    """

    matches_in_order = True

    def __init__(
        self, pairs: Mapping[tuple[int, int], dist.ProcessGroup], rank: int, processes: Sequence[int]
    ) -> None:
        self._pairs = dict(pairs)
        self._rank = rank
        self._processes = processes

    @classmethod
    def form(
        cls,
        pairs: Iterable[tuple[int, int]],
        rank: int,
        device: torch.device,
        processes: Sequence[int],
        timeout: timedelta | None = None,
    ) -> "NcclTransport":
        """Make the communicators of all (sender, receiver) ``pairs``, on every rank in the same order.

        Each is used once, since NCCL connects at the first message; without it the first step would wait.
        ``processes`` are the numbers of the ranks' processes in the default group; ``timeout`` is that of
        each communicator, by default torch's.
        """
        members = {pair: sorted(processes[each] for each in pair) for pair in sorted(set(pairs))}
        groups = {
            pair: dist.new_group(both, timeout=timeout, backend="nccl") for pair, both in members.items()
        }
        mine = {pair: group for pair, group in groups.items() if rank in pair}
        transport = cls(mine, rank, processes)
        for sender, receiver in transport._pairs:
            probe = torch.zeros(1, device=device)
            if rank == sender:
                transport.send(probe, receiver, 0).wait()
            else:
                transport.receive(probe, sender, 0).wait()
        return transport

    def send(self, tensor: Tensor, receiver: int, tag: int) -> dist.Work:
        """Start sending on the communicator of this direction."""
        group = self._pairs[self._rank, receiver]
        work = dist.isend(tensor, self._processes[receiver], group=group)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, sender: int, tag: int) -> dist.Work:
        """Start receiving on the communicator of this direction."""
        group = self._pairs[sender, self._rank]
        work = dist.irecv(tensor, self._processes[sender], group=group)
        assert work is not None
        return work

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The communicators of this rank."""
        return tuple(self._pairs.values())

    def close(self) -> None:
        """Forget the communicators."""
        self._pairs.clear()
