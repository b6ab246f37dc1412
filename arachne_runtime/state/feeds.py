"""How far training has gone through what each call of ``session.batches`` gives, and where it goes on."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from torch.utils.data import Dataset

from ..data import GlobalOrder, LoaderSettings, StepBatch, load_steps
from ..data.batch import WholeBatch, copied
from ..data.loader import LoadedRows, merged
from ..data.prefetch import CudaLane, one_ahead
from ..engine import Engine, StepReport
from ..errors import UsageError
from .job import FeedPosition, Positions


@dataclass(frozen=True, slots=True)
class Feed:
    """What one call of ``session.batches`` reads."""

    dataset: Dataset[Any]
    order: GlobalOrder
    settings: LoaderSettings
    number: int
    """Of the call, counted from 0."""
    start: FeedPosition
    """Of its order, without steps: the same on a process that made fewer calls, as one that joins."""

    def load(self, engine: Engine, steps: range) -> Iterator[LoadedRows]:
        """The rows of some steps that the engine's plan needs."""
        loaded = load_steps(
            self.dataset, self.order, steps, engine.needed_rows, self.settings, feed=self.number
        )
        if engine.device.type == "cuda":
            return one_ahead(loaded, CudaLane(engine.device))
        return loaded


@dataclass(slots=True)
class Feeds:
    """The calls of a script that trains on them in the same order whenever it runs; it may evaluate anywhere.

    A call is known by its order of samples, and by how many calls had the same one before: a process that
    joins, or a run that goes on, has not made the calls for evaluations behind steps that it did not do.
    """

    keeps_batches: bool = False
    """Remember what was trained on, to train on it again (``since``)."""
    _feeds: list[Feed] = field(default_factory=list)
    _done: dict[FeedPosition, int] = field(default_factory=dict)
    """By start of a call: steps of its order that were trained on; one for evaluation has none."""
    _trained: dict[int, StepBatch] = field(default_factory=dict)
    """By step of the engine, what was trained on, in memory of its own; of what can be loaded anew,
    only which it was."""
    _first: int = 0
    """The oldest step of which that can be there."""

    @property
    def num_calls(self) -> int:
        """Until now."""
        return len(self._feeds)

    def go_on(self, before: Positions) -> None:
        """From where another run was, or the others are: it is heard, nobody is asked."""
        self._done = _done_of(before)

    def go_back(self, positions: Positions) -> None:
        """To where this run was; the calls that it has made since are still known."""
        self._done = _done_of(positions)

    def open(self, dataset: Dataset[Any], order: GlobalOrder, settings: LoaderSettings) -> tuple[Feed, int]:
        """A call: what it reads, and how many steps of its order are done."""
        start = _start(order, sum(feed.order == order for feed in self._feeds))
        feed = Feed(dataset, order, settings, self.num_calls, start)
        self._feeds.append(feed)
        return feed, self._done.get(start, 0)

    def reload(self, batch: StepBatch, engine: Engine) -> StepBatch:
        """The same step's rows that the engine's plan needs now; a batch that has them is given back."""
        if not isinstance(batch, LoadedRows) or batch.feed is None:
            return batch
        held = {rows for rows, _ in batch.pieces}
        if held.issuperset(merged(engine.needed_rows(batch.num_rows))):
            return batch
        feed = self._feeds[batch.feed]
        alone = replace(feed, settings=replace(feed.settings, num_workers=0))
        (loaded,) = alone.load(engine, range(batch.step, batch.step + 1))
        return loaded

    def after_step(self, report: StepReport, batch: StepBatch) -> None:
        """A batch was trained on.

        Raises:
            UsageError: The run before trained on a call that the script has not made.

        """
        kept = batch
        if isinstance(batch, LoadedRows) and batch.feed is not None:
            start = self._feeds[batch.feed].start
            if start not in self._done:
                self._refuse_another(start)
            self._done[start] = batch.step + 1
            kept = replace(batch, pieces=())
        elif self.keeps_batches and isinstance(batch, WholeBatch):
            kept = replace(batch, tree=copied(batch.tree))
        if self.keeps_batches:
            self._trained[report.step] = kept

    def since(self, num_steps: int, engine: Engine) -> Iterator[StepBatch]:
        """What was trained on when so many steps were done, and from then on, loaded for the engine's plan.

        Raises:
            UsageError: It was forgotten.

        """
        for step in range(num_steps, max(self._trained, default=-1) + 1):
            if step not in self._trained:
                raise UsageError(
                    f"the batch of step {step} was forgotten; the oldest is {min(self._trained)}"
                )
            yield self.reload(self._trained[step], engine)

    def forget(self, num_steps: int) -> None:
        """Nobody will go back to before so many steps, or this process was not there."""
        self._first = max(self._first, num_steps)
        self._trained = {step: batch for step, batch in self._trained.items() if step >= num_steps}

    def has_since(self, num_steps: int) -> bool:
        """Whether this process can do again what came when so many steps were done."""
        return num_steps >= self._first

    def positions(self) -> Positions:
        """Of every call that was trained on, also by the run before, in one order on all processes."""
        starts = sorted(self._done, key=msgspec.structs.astuple)
        return tuple(msgspec.structs.replace(start, steps=self._done[start]) for start in starts)

    def _refuse_another(self, start: FeedPosition) -> None:
        """The script trains on a call that is new: all that were trained on before must have been made."""
        made = {feed.start for feed in self._feeds}
        if (missing := next((before for before in self._done if before not in made), None)) is not None:
            raise UsageError(
                f"this call of session.batches has {_told(start)}, but had {_told(missing)} when the "
                "checkpoint was written, so its position means nothing; make the same calls in the same "
                "order, or give this job another folder of checkpoints"
            )


def _done_of(positions: Positions) -> dict[FeedPosition, int]:
    """Steps by start; older files do not say which of several calls with one order it was."""
    found: dict[FeedPosition, int] = {}
    for each in positions:
        if each is not None:
            start = msgspec.structs.replace(each, steps=0)
            while start in found:
                start = msgspec.structs.replace(start, repeat=start.repeat + 1)
            found[start] = each.steps
    return found


def _start(order: GlobalOrder, repeat: int) -> FeedPosition:
    return FeedPosition(
        num_samples=order.num_samples, global_batch=order.global_batch, seed=order.seed,
        shuffle=order.shuffle, drop_last=order.drop_last, steps=0, repeat=repeat,
    )  # fmt: skip


def _told(position: FeedPosition) -> str:
    order = "shuffled" if position.shuffle else "in order"
    end = ", without the last short batch" if position.drop_last else ""
    return (
        f"{position.num_samples} samples {order} under seed {position.seed} in batches of "
        f"{position.global_batch}{end}"
    )


def loaded_by_plan(engine: Engine, feed: Feed, steps: range) -> Iterator[StepBatch]:
    """The batches of some steps; what was loaded ahead for a plan that went is loaded anew."""
    while steps:
        plan = engine.plan
        for batch in feed.load(engine, steps):
            steps = steps[1:]
            yield batch
            if engine.plan is not plan:
                break
