"""The ranks that train one model together, and the numbers that they tell each other beside gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UsageError
from ..surroundings import Surroundings

_MEET_FIRST = (
    "they had not met when HeteroDDP or HeteroLoader was made; call torch.distributed.init_process_group "
    "before it (or make the Accelerator; in Lightning, make it in train_dataloader())"
)


_WIDTH = 128
"""Numbers of a message, or a multiple: messages of one size meet even where ranks are at different places."""


class Place(IntEnum):
    """Where in a script a rank tells others numbers."""

    WRAP = auto()
    EPOCH = auto()
    BATCH = auto()
    STEP = auto()
    FIRST_STEP = auto()
    END_OF_STEP = auto()
    FAILURE = auto()
    EVALUATION = auto()


_WORDS = {
    Place.WRAP: "wraps a model",
    Place.EPOCH: "begins epoch {:.0f}",
    Place.BATCH: "counts the items of step {:.0f}",
    Place.STEP: "sums the gradients of step {:.0f}",
    Place.FIRST_STEP: "compares parameters",
    Place.END_OF_STEP: "ends a step",
    Place.FAILURE: "hears of a failure",
    Place.EVALUATION: "ends an evaluation",
}


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
            refuse_unmet()
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

    def table(self, place: Place, mine: Sequence[float], number: int = 0) -> "Table":
        """Start telling all ranks these numbers, as many on each, and where in the script this rank is.

        Args:
            place: What this is about.
            mine: The numbers of this rank.
            number: Of the step or epoch.

        """
        told = [float(place), float(number), *mine]
        width = -(-len(told) // _WIDTH) * _WIDTH
        values = np.zeros((self.num_ranks, width))
        values[self.rank, : len(told)] = told
        message = torch.from_numpy(values)
        work = None if self.control is None else self.control.allreduce([message])
        return Table(values[:, : len(told)], self.rank, work)

    def broadcast(self, values: Tensor) -> None:
        """Take over the first rank's values, in host memory."""
        if self.control is not None:
            dist.broadcast(values, group=self.control, group_src=0)


def refuse_unmet() -> None:
    """UsageError where this process is no rank yet, but was started with others."""
    if (started := Surroundings.here().world_size) > 1:
        raise UsageError(f"{started} processes were started, but {_MEET_FIRST}")


@dataclass(slots=True)
class Table:
    """Numbers on their way: a sum in which each rank has a row, so that what is added are zeros."""

    values: NDArray[np.float64]
    """Shape ``(ranks, 2 + numbers)``: first the place in the script, and its number."""
    rank: int
    work: dist.Work | None

    def rows(self) -> list[list[float]]:
        """By rank, once they have arrived.

        Raises:
            UsageError: Ranks are at different places of the script, on all of them.

        """
        if self.work is not None:
            self.work.wait()
            self.work = None
        found: list[list[float]] = self.values.tolist()
        mine = found[self.rank][:2]
        for rank, (place, number, *_) in enumerate(found):
            if [place, number] != mine:
                _refuse_apart(self.rank, mine, rank, (place, number))
        return [row[2:] for row in found]

    def total(self) -> float:
        """The sum of the first number, once they have arrived."""
        return math.fsum(row[0] for row in self.rows())


def _refuse_apart(mine: int, here: Sequence[float], other: int, there: Sequence[float]) -> NoReturn:
    first, second = sorted(((mine, here), (other, there)))
    told = (
        f"rank {rank} {_WORDS[Place(round(place))].format(number)}"
        for rank, (place, number) in (first, second)
    )
    raise UsageError(
        f"{' while '.join(told)}: every rank takes the same steps of the same epochs; skip or repeat a step, "
        "leave a loop, or evaluate on all ranks or on none (first let them agree, by an all-reduce)"
    )
