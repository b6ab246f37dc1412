"""The ranks that train one model together, and the numbers that they tell each other beside gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError
from ..surroundings import Surroundings

_MEET_FIRST = (
    "they had not met when HeteroDDP or HeteroLoader was made; call torch.distributed.init_process_group "
    "before it (or make the Accelerator; in Lightning, make it in train_dataloader())"
)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of one process group; a lone process without a group is its only rank."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    """Carries gradients; None: alone."""
    control: dist.ProcessGroup | None
    """Carries numbers in host memory, so that no GPU is waited for."""
    host_waits: bool = False
    """Whether the host waits for messages of gradients anyhow, so that it may read words which they carry."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> "Peers":
        """The ranks of ``group``; default: all. Every rank calls it: GPUs get a second group, of gloo.

        Raises:
            UsageError: Several ranks were started and have not met, or this one is not in ``group``.

        """
        if not dist.is_initialized():
            if (started := Surroundings.here().world_size) > 1:
                raise UsageError(f"{started} processes were started, but {_MEET_FIRST}")
            return cls(0, 1, None, None)
        found = group or dist.group.WORLD
        assert found is not None
        if dist.get_rank(found) < 0:
            raise UsageError("this process is not a rank of the process group that it was given")
        ranks = dist.get_process_group_ranks(found)
        backends = dict(part.split(":") for part in dist.get_backend_config(found).split(","))
        control = found if "cpu" in backends else dist.new_group(ranks, backend="gloo")
        host_waits = set(backends.values()) == {dist.Backend.GLOO}
        return cls(dist.get_rank(found), len(ranks), found, control, host_waits)

    def refuse_strangers(self) -> None:
        """UsageError where this rank is taken for alone, but has met others since."""
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(f"this model or loader knows of one process only: {_MEET_FIRST}")

    def table(self, mine: Sequence[float]) -> "Table":
        """Start telling all ranks these numbers, as many on each."""
        values = torch.zeros(self.num_ranks, len(mine), dtype=torch.float64)
        values[self.rank] = torch.tensor(mine, dtype=torch.float64)
        return Table(values, None if self.control is None else self.control.allreduce([values]))

    def broadcast(self, values: Tensor) -> None:
        """Take over the first rank's values, in host memory."""
        if self.control is not None:
            dist.broadcast(values, group=self.control, group_src=0)

    def sum(self, value: float) -> "Table":
        """Start adding up one number of each rank."""
        values = torch.tensor([[value]], dtype=torch.float64)
        return Table(values, None if self.control is None else self.control.allreduce([values]))


@dataclass(slots=True)
class Table:
    """Numbers on their way: a sum in which each rank has a row, so that what is added are zeros."""

    values: Tensor
    """Shape ``(ranks, numbers)``, or ``(1, 1)`` for a sum."""
    work: dist.Work | None

    def rows(self) -> list[list[float]]:
        """By rank, once they have arrived."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        found: list[list[float]] = self.values.tolist()
        return found

    def total(self) -> float:
        """The sum, once it has arrived."""
        return self.rows()[0][0]
