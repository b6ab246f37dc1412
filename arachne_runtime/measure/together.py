"""Keeps all ranks at the same measurement: they start it together and agree on one number."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that measure at the same time, so that every device is as busy as it is in training.

    Its messages are CPU tensors: the process group needs a CPU backend. A single process needs no group.
    """

    rank: int
    size: int

    @classmethod
    def of_default_group(cls) -> "Together":
        """All ranks of the default process group; this process alone where there is none."""
        if not dist.is_initialized():
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size())

    def barrier(self) -> None:
        """Wait for every rank."""
        self.largest(0.0)

    def work_until_all_are_here(self, work: Callable[[], object]) -> None:
        """A barrier that does not pause: ``work`` is repeated until every rank has come."""
        if self.size == 1:
            return
        arrival = dist.all_reduce(torch.zeros(1), async_op=True)
        assert arrival is not None
        while not arrival.is_completed():
            work()
        arrival.wait()

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.size == 1:
            return value
        agreed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return float(agreed.item())

    def largest_of(self, count: int, index: int | None, value: float) -> list[float]:
        """``count`` numbers, each the largest that a rank gave for it; a rank gives at most one (≥ 0)."""
        agreed = torch.zeros(count, dtype=torch.float64)
        if index is not None:
            agreed[index] = value
        if self.size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return [float(each) for each in agreed]

    def gather(self, data: bytes) -> tuple[bytes, ...]:
        """Every rank's bytes, by rank; on every rank. No pickles."""
        if self.size == 1:
            return (data,)
        length = int(self.largest(len(data)))
        padded = torch.zeros(length + 8, dtype=torch.uint8)
        padded[:8] = torch.tensor(list(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        padded[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return tuple(_unpad(bytes(each.numpy())) for each in everyone)


def _unpad(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
