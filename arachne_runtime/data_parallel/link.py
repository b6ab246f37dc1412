"""What a model and the loader that feeds it share on one rank: the weight of each batch, what steps took."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist

from ..batch import Balancer, NoiseReading, Reading, TimeModel
from ..errors import UsageError, WorkerFailedError
from .peers import Peers, Table, refuse_unmet

if TYPE_CHECKING:
    from .adaptive import Adaptation
    from .reducer import Reducer


class Sharing(Protocol):
    """Decides the shares of a step: ``batch.balance.Balancer``, or another, alike on every rank."""

    @property
    def caps(self) -> tuple[int | None, ...]:
        """The most samples that each rank takes at once, as far as known."""
        ...

    def observe(self, readings: Sequence[Reading]) -> None:
        """A step has ended; readings by rank."""
        ...

    def shares(self, global_batch: int) -> tuple[int, ...]:
        """Samples by rank."""
        ...

    def limit(self, replica: int, cap: int) -> None:
        """A rank takes at most so many samples at once."""
        ...


@runtime_checkable
class TimedSharing(Sharing, Protocol):
    """Shares that rest on a time model, from which an adaptive batch is chosen too."""

    @property
    def minima(self) -> tuple[int, ...]:
        """The least samples of each rank."""
        ...

    def model(self) -> TimeModel:
        """What is known of the time of a step; NotMeasuredError before anything is."""
        ...


@dataclass(slots=True)
class Weight:
    """The part of the global batch that a batch is; in items it is known when all ranks have counted."""

    mine: float
    of: float | Table

    def value(self) -> float:
        """Between 0 and 1.

        Raises:
            UsageError: The global batch has no items.

        """
        if isinstance(self.of, Table):
            self.of = self.of.total()
        if self.of <= 0:
            raise UsageError(
                "num_items counts no items in the global batch; a mean over none has no value: give batches "
                "with at least one, or count otherwise"
            )
        return self.mine / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The batch that the loader has just given out."""

    step: int
    """Counted over the life of the loader."""
    rows: int
    """Samples of this batch that are this rank's own; 0: it holds another's, to join with no weight."""
    shares: tuple[int, ...]
    """Of all ranks, in this batch."""
    num_rounds: int
    """Batches of each rank in the step."""
    weight: Weight
    is_last: bool
    """Whether the step ends with this batch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank ran out of memory in a step."""

    rank: int
    rows: int
    """Samples of the batch that did not fit."""
    cap: int
    """Samples that it expects to fit."""

    def error(self, way_out: str) -> WorkerFailedError:
        """What every rank ends with where the step is not repeated."""
        error = WorkerFailedError(f"rank {self.rank} ran out of memory with {self.rows} samples; {way_out}")
        error.rank = self.rank
        return error


@dataclass(eq=False)
class Link:
    """Found by both under their process group; see ``link_of``."""

    peers: Peers
    sharing: Sharing
    turn: Turn | None = None
    readings: Sequence[Reading] | None = None
    """Of the last sum that brought any, where it is not learnt from at once; the loader takes them away."""
    noise: Sequence[NoiseReading] = ()
    """By parameter group, as told with the last sum; the loader takes it away."""
    adaptation: "Adaptation | None" = None
    """Of the loader whose batch is adaptive, if there is one."""
    caps: Sequence[int] = ()
    """Samples that each rank expects to fit, as told with the last sum; 0: it cannot tell."""
    failures: Sequence[Failure] = ()
    """Of the step under way, as every rank knows them."""
    repeats: bool = False
    """Whether the body of a step is inside ``loader.step``, which gives a failed one again."""
    num_iterations: int = 0
    """Of loaders, one inside the other, that are under way."""
    num_sums: int = 0
    """Since the loader gave out the last step."""
    _reducers: list["ref[Reducer]"] = field(default_factory=list)
    is_of_group: bool = False
    """Whether any model of the process group belongs to it; else those that were given its loader."""
    is_read_ahead: bool = False
    """Whether the script takes batches before it trains with them, and sets ``turn`` itself."""
    _told: bool = False
    _told_untrained: bool = False
    _is_weighed: bool = False
    """Whether a backward began since the loader gave out the last step."""
    _loader: object = None
    """That gave out the last step."""

    @property
    def reducers(self) -> "list[Reducer]":
        """Of the models that train here."""
        return [reducer for reference in self._reducers if (reducer := reference()) is not None]

    def join(self, reducer: "Reducer") -> None:
        """A model trains here."""
        self._reducers.append(ref(reducer))

    def weight(self) -> float:
        """Of the present batch of this rank, whose backward begins."""
        self._is_weighed = True
        if self.turn is not None:
            return self.turn.weight.value()
        if not self._told and self.peers.num_ranks > 1:
            self._told = True
            if self.peers.rank == 0:
                warnings.warn(
                    "HeteroDDP got a batch that no HeteroLoader gave out: every rank weighs the same, as in "
                    "DistributedDataParallel; with an arachne.HeteroLoader shares follow the devices",
                    stacklevel=2,
                )
        return 1 / self.peers.num_ranks

    def hear(self, readings: Sequence[Reading]) -> None:
        """Of the sum before, on all ranks, while this one's last message travels: time to learn from them.

        Where several models train in a step, the last one's count, once the step is over.
        """
        if len(self._reducers) == 1:
            self.sharing.observe(readings)
        else:
            self.readings = readings

    def begin_step(self, loader: object) -> None:
        """A loader is asked for a step: learn from the last one."""
        if self.readings is not None:
            self.sharing.observe(self.readings)
        self._limit()
        self._warn_of_untrained(loader)
        if self.num_sums != 1 or loader is not self._loader:
            self.restart_clocks()
        self.readings, self.failures, self.num_sums, self._loader = None, (), 0, loader
        self._is_weighed = False

    def end_epoch(self) -> None:
        """The loader was asked for a step and had none left: nothing is in the script's hands."""
        self._loader = None

    def _warn_of_untrained(self, loader: object) -> None:
        """Once, where a batch was given out and another is asked for, and no gradient was weighed."""
        is_due = not (self._is_weighed or self.failures or self._told_untrained or self.is_read_ahead)
        is_watched = self.peers.num_ranks > 1 and (self.is_of_group or bool(self._reducers))
        if is_due and is_watched and loader is self._loader and torch.is_grad_enabled():
            self._told_untrained = True
            if self.peers.rank == 0:
                warnings.warn(
                    "a HeteroLoader is asked for a batch, but no HeteroDDP model had a backward with the one "
                    "before: wrap the model that trains in arachne.HeteroDDP, and take no batch ahead (no "
                    "list(loader)), since gradients are weighed by the batch given out last; batches that "
                    "train nothing are read under torch.no_grad()",
                    stacklevel=5,
                )

    def _limit(self) -> None:
        known = self.sharing.caps
        for rank, cap in enumerate(self.caps):
            before = known[rank]
            if cap and (before is None or cap < before):
                self.sharing.limit(rank, cap)
        self.caps = ()

    def restart_clocks(self) -> None:
        """What is to come does not follow the last sum."""
        for reducer in self.reducers:
            reducer.restart_clock()


_LINKS: "WeakValueDictionary[dist.ProcessGroup | None, Link]" = WeakValueDictionary()


def link_of(group: dist.ProcessGroup | None = None) -> Link:
    """The link of the models and loaders of a group (default: all ranks); made where there is none."""
    found = group or (dist.group.WORLD if dist.is_initialized() else None)
    if found is None:
        refuse_unmet()  # also where an earlier model was alone
    link = _LINKS.get(found)
    if link is None:
        link = new_link(group)
        link.is_of_group = True
        _LINKS[found] = link
    return link


def new_link(group: dist.ProcessGroup | None = None, sharing: Sharing | None = None) -> Link:
    """A link of its own."""
    peers = Peers.of(group)
    return Link(peers, sharing or Balancer(num_replicas=peers.num_ranks))
