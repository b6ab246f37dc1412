"""Keeps all ranks at the same measurement: they start it together and agree on one number."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that measure at the same time, so that every device is as busy as it is in training.

    A single process needs no group.
    """

    rank: int
    size: int
    device: torch.device = CPU
    """Where its messages are: the process group needs a backend for it."""

    @classmethod
    def of_default_group(cls, device: torch.device = CPU) -> "Together":
        """All ranks of the default process group; this process alone where there is none."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

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
        agreed = torch.tensor([value], dtype=torch.float64, device=self.device)
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
        told = len(data).to_bytes(8, "little") + data
        padded = torch.zeros(length + 8, dtype=torch.uint8)
        padded[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        padded = padded.to(self.device)
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return tuple(_unpad(bytes(each.cpu().numpy())) for each in everyone)


def _unpad(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
