"""Gives each rank its rows of every global batch: one order of samples, shares that follow the devices."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import Dataset

from ..data.loader import num_samples_of
from ..data.order import GlobalOrder
from ..errors import UsageError
from .adaptive import Adaptation, AdaptiveBatch, adaptation_of
from .arguments import checked_batch, checked_dataset, refuse_attribute
from .feed import Feed
from .learnt import load_learnt, told_learnt
from .likeness import number_of_cuts
from .link import Link, Sharing, Turn, Weight, link_of, new_link
from .peers import Place
from .portion import Step, rounds_of
from .step import StepBody


class HeteroLoader:
    """Batches of this rank, for a model wrapped in ``HeteroDDP``; iterate over it once an epoch.

    Epoch ``e`` visits the samples in an order that is a function of (seed, e) alone; each step takes the next
    ``global_batch`` of them, and each rank a run of these as long as its share. Shares start even; at every
    step the loader learns from the last one's times. The last batch of an epoch, which may be short, is
    shared out anew. A rank that gets no row of it gets one of another rank's, which weighs nothing
    (``num_rows`` is 0), so that it joins the step.

    Args:
        dataset: With ``__len__`` and ``__getitem__``.
        global_batch: Samples of all ranks in a step; it may be set between steps.
        seed: Of the order, and of what samples draw (augmentation): the same whichever rank reads them.
        shuffle: Else samples come in the dataset's order.
        drop_last: Leave out the short batch at the end of an epoch.
        num_items: Counts the items (tokens) of a batch over which its loss is the mean; default: its rows.
        process_group: The ranks that share; default: all.
        sharing: Decides shares, alike on every rank; default: a ``Balancer`` that learns.
        adaptive: Let the global batch follow the gradient noise; ``global_batch`` is then where it starts,
            and what the learning rate was chosen for. The body of the loop is then inside ``loader.step``.
        options: For ``torch.utils.data.DataLoader``: collate_fn, num_workers, pin_memory, ... With workers,
            shares take effect after the batches that they have loaded ahead.

    Raises:
        UsageError: No step in the dataset, a stream, or an option that would choose samples.

    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_items: Callable[[Any], Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        sharing: Sharing | None = None,
        adaptive: AdaptiveBatch | None = None,
        **options: Any,
    ) -> None:
        self._order = GlobalOrder(
            num_samples=num_samples_of(checked_dataset(dataset)),
            global_batch=checked_batch(global_batch, options),
            seed=seed,
            drop_last=drop_last,
            shuffle=shuffle,
        )
        self.dataset = dataset
        self._feed = Feed(dataset, seed, options)
        self._num_items = num_items
        self._group = process_group
        self._has_own_link = sharing is not None
        self.link: Link = new_link(process_group, sharing) if sharing else link_of(process_group)
        """What this loader and the models that it feeds share."""
        self._adaptation = adaptation_of(adaptive, self._order, self.link) if adaptive else None
        self._epoch, self._position = 0, 0
        self._goes_on = True
        """Whether the next iteration starts at this place; else at the next epoch."""
        self._number = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """AttributeError, with what stands for an attribute of a DataLoader."""
            refuse_attribute(name)

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a step; UsageError where one that is adaptive is set."""
        return self._order.global_batch

    @global_batch.setter
    def global_batch(self, samples: int) -> None:
        if self._adaptation is not None:
            raise UsageError("the batch is adaptive; bound it with AdaptiveBatch(least=..., most=...)")
        self._order = self._order.with_batch(samples)

    @property
    def num_rows(self) -> int:
        """Samples of the present batch that are this rank's own."""
        return self.link.turn.rows if self.link.turn else 0

    @property
    def amount(self) -> float:
        """Samples, or items, of the present batch that are this rank's own."""
        return self.link.turn.weight.mine if self.link.turn else 0.0

    @property
    def is_at_end(self) -> bool:
        """Whether the present batch is the last of its epoch."""
        turn = self.link.turn
        return turn is not None and turn.is_last and self._order.num_rows_at(self._position) == 0

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of every rank in the present batch; none before the first."""
        return self.link.turn.shares if self.link.turn else ()

    @property
    def is_adaptive(self) -> bool:
        """Whether the global batch follows the gradient noise."""
        return self._adaptation is not None

    @property
    def adaptation(self) -> Adaptation:
        """Where an adaptive batch is: ``lr_factor``, ``noise_scale``, ``decisions``.

        Raises:
            UsageError: The batch is not adaptive.

        """
        if self._adaptation is None:
            raise UsageError("the batch of this loader stays as it is set; make it with adaptive=")
        return self._adaptation

    @property
    def progress(self) -> float:
        """Steps of the base batch that training was worth before this step: what schedules are asked with.

        Raises:
            UsageError: The batch is not adaptive: then it is the number of steps.

        """
        return self.adaptation.controller.progress.steps

    def claim(self) -> Link:
        """A link that only the models that ask for this loader share with it."""
        if not self._has_own_link:
            self.link.adaptation = None if self.link.adaptation is self._adaptation else self.link.adaptation
            learnt = told_learnt(self.link, None)  # by a state that was loaded before
            self.link, self._has_own_link = new_link(self._group), True
            load_learnt(learnt, self.link, None)
            if self._adaptation is not None:
                self._adaptation.join(self.link)
        return self.link

    def step(self, *actors: Any) -> StepBody:
        """Enter it around the body of the loop, from the forward to the optimizer's step: for three things.

        A rank that runs out of memory joins what the others still do, no rank takes the step, and the loader
        gives the same samples again with a smaller share there. Where no shares fit into memory, the step
        comes as several batches, whose gradients are added up. And where the batch is adaptive, the optimizer
        steps with its learning rates times ``adaptation.lr_factor``, which are as they were again after it.

        Args:
            actors: What acts once a step inside the body: the optimizer, and a GradScaler or learning-rate
                schedule where there is one. With an adaptive batch, a schedule that is stepped in the body
                takes as many steps as the batch is worth in those of the base batch, also none.

        """
        return StepBody(self.link, actors, self._adaptation)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration with this epoch; without it each iteration is the next epoch.

        A place in the middle of this epoch that was loaded stays.
        """
        if epoch < 0:
            raise UsageError(f"epoch {epoch}; epochs count from 0")
        if self._goes_on and epoch == self._epoch:
            return
        self._epoch, self._position, self._goes_on = epoch, 0, True

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self._order.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The place behind the batch that was given out last, and what was learnt, in plain values.

        It holds for any number of ranks, but for the speeds of ranks. Readings of the last two steps, which
        were not heard of yet, are lost. Alike on all ranks: one may save it for all.
        """
        epoch, position = self._epoch, self._position
        if self._goes_on is False and self._order.num_rows_at(position) == 0:
            epoch, position = epoch + 1, 0
        learnt = told_learnt(self.link, self._adaptation)
        return {"epoch": epoch, "position": position, **self._order_numbers(), **learnt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the exact sample; UsageError for a state of another order."""
        numbers = self._order_numbers()
        if missing := {"epoch", "position", *numbers} - set(state):
            raise UsageError(
                f"this is no state of a HeteroLoader, which has {', '.join(sorted(missing))} too; load what "
                "its state_dict() gave"
            )
        for key, mine in numbers.items():
            if state[key] != mine:
                raise UsageError(
                    f"the state has {key}={state[key]}, this loader {mine}: another order of samples"
                )
        load_learnt(state, self.link, self._adaptation)
        if self._adaptation is not None:
            self._order = self._order.with_batch(self._adaptation.controller.batch)
        self._epoch, self._position, self._goes_on = state["epoch"], state["position"], True

    def _order_numbers(self) -> dict[str, int]:
        order = self._order
        return {"num_samples": order.num_samples, "seed": order.seed, "shuffle": int(order.shuffle)}

    def __iter__(self) -> Iterator[Any]:
        """The batches of the rest of this epoch, or of the next one.

        Raises:
            UsageError: Ranks differ in what decides the order of samples.

        """
        if not self._goes_on:
            self._epoch, self._position = self._epoch + 1, 0
        self._goes_on = False
        self.link.peers.refuse_strangers()
        self._agree()
        outer = self.link.turn if self.link.num_iterations else None
        self.link.num_iterations += 1
        try:
            yield from self._batches()
            self.link.turn = None
        finally:  # a batch of next(iter(loader)) is still in the script's hands
            self._feed.forget()
            self.link.num_iterations -= 1
            self.link.turn = outer or self.link.turn
            self.link.restart_clocks()

    def _batches(self) -> Iterator[Any]:
        ahead: deque[Step] = deque()
        repeats = False
        while True:
            if self._adaptation is not None:
                self._adaptation.end()
            self.link.begin_step(self)
            if self._adaptation is not None and not repeats:
                self._adaptation.learn(self.link)
                self._order = self._order.with_batch(self._adaptation.controller.batch)
            self._plan(ahead)
            if not ahead:
                self.link.end_epoch()
                return
            step = ahead.popleft()
            yield from self._give(step)
            repeats = bool(self.link.failures)
            if repeats:
                self._repeat(step)
                ahead.clear()

    def _plan(self, ahead: deque[Step]) -> None:
        """Decide as many steps as are loaded ahead, and the one that is due."""
        position = ahead[-1].stop if ahead else self._position
        while len(ahead) <= self._feed.lead and (num_rows := self._order.num_rows_at(position)):
            rounds = rounds_of(num_rows, self.link.sharing)
            step = Step(self._number, self._epoch, position, self._order.global_batch, rounds)
            for portion in step.portions(self.link.peers.rank):
                self._feed.plan(step.epoch, self._order.at(step.epoch, portion.places))
            ahead.append(step)
            self._number += 1
            position = step.stop

    def _give(self, step: Step) -> Iterator[Any]:
        """Batches of one step for this rank, until the step has failed."""
        if self._adaptation is not None:
            self._adaptation.begin(step.num_rows, step.batch)
        portions = step.portions(self.link.peers.rank)
        batches = [self._feed.next() for _ in portions]
        weights = self._weights(batches, [portion.rows for portion in portions], step)
        for index, (batch, portion) in enumerate(zip(batches, portions, strict=True)):
            is_last = index == len(portions) - 1
            self.link.turn = Turn(
                step=step.number,
                rows=portion.rows,
                shares=step.rounds[index],
                num_rounds=len(portions),
                weight=weights[index],
                is_last=is_last,
            )
            self._position = step.stop if is_last else step.start
            yield batch
            if self.link.failures:
                return

    def _weights(self, batches: list[Any], rows: list[int], step: Step) -> list[Weight]:
        if self._num_items is None:
            return [Weight(float(mine), float(step.num_rows)) for mine in rows]
        counted = [
            _count(self._num_items, batch) if mine else 0.0 for batch, mine in zip(batches, rows, strict=True)
        ]
        total = self.link.peers.table(Place.BATCH, [sum(counted)], step.number)
        return [Weight(mine, total) for mine in counted]

    def _repeat(self, step: Step) -> None:
        """Give the samples of a step that failed again, in shares that fit.

        Raises:
            WorkerFailedError: A rank cannot take a single sample.

        """
        for failure in self.link.failures:
            if failure.cap < 1:
                raise failure.error("that is the least a rank can take: use a smaller model, or leave it out")
            self.link.sharing.limit(failure.rank, failure.cap)
        self._position = step.start
        self._feed.forget()

    def _agree(self) -> None:
        """UsageError on every rank where they would not take their parts of the same samples."""
        order = self._order
        mine = {
            **self._order_numbers(),
            "the dataset (a checksum of the indices of its Subset)": number_of_cuts(self.dataset),
            "global_batch": order.global_batch,
            "drop_last": int(order.drop_last),
            "epoch": self._epoch,
            "position": self._position,
            "progress of an adaptive batch": self.progress if self._adaptation is not None else -1,
            "num_workers * prefetch_factor": self._feed.lead,
            "having num_items": int(self._num_items is not None),
        }
        told = [float(value) for value in mine.values()]
        rows = self.link.peers.table(Place.EPOCH, told, self._epoch).rows()
        for name, values in zip(mine, zip(*rows, strict=True), strict=True):
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise UsageError(
                        f"the loaders of the ranks differ in {name}: rank 0 has {values[0]:g}, rank {rank} "
                        f"has {value:g}; make them with the same arguments, and load the same state"
                    )


def _count(num_items: Callable[[Any], Any], batch: Any) -> float:
    items = float(num_items(batch))
    if not 0 <= items < float("inf"):
        raise UsageError(f"num_items(batch) gave {items}; it counts items: a number, 0 or more")
    return items
