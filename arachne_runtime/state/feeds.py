"""How far training has gone through what each call of ``session.batches`` gives, and where it goes on."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from ..data import GlobalOrder, LoaderSettings, StepBatch, load_steps
from ..data.loader import LoadedRows
from ..data.prefetch import CudaLane, one_ahead
from ..engine import Engine, StepReport
from ..errors import UsageError
from .job import FeedPosition


@dataclass(slots=True)
class Feeds:
    """The calls of a script, in their order, which is the same whenever it runs again."""

    num_calls: int = 0
    _orders: list[GlobalOrder] = field(default_factory=list)
    _done: dict[int, int] = field(default_factory=dict)
    """By call: steps of its order that were trained on; one for evaluation has none."""
    _before: tuple[FeedPosition | None, ...] = ()
    """Of the run from which this one goes on."""

    def go_on(self, before: tuple[FeedPosition | None, ...]) -> None:
        """From where another run was."""
        self._before = before
        self._done = {call: each.steps for call, each in enumerate(before) if each is not None}

    def open(self, order: GlobalOrder) -> tuple[int, int]:
        """A call: its number, and how many steps of its order are done.

        Raises:
            UsageError: The run before had another order of samples in this place.

        """
        call, self.num_calls = self.num_calls, self.num_calls + 1
        self._orders.append(order)
        before = self._before[call] if call < len(self._before) else None
        if before is not None and before != _position(order, before.steps):
            raise UsageError(
                f"call {call} of session.batches has {_told(_position(order, 0))}, but had {_told(before)} "
                "when the checkpoint was written, so its position means nothing; make the same calls in the "
                "same order, or give this job another folder of checkpoints"
            )
        return call, before.steps if before is not None else 0

    def after_step(self, report: StepReport, batch: StepBatch) -> None:
        """A batch was trained on."""
        if isinstance(batch, LoadedRows) and batch.feed is not None:
            self._done[batch.feed] = batch.step + 1

    def positions(self) -> tuple[FeedPosition | None, ...]:
        """Of every call until now, and of those of the run before that are still to come."""
        now = [
            _position(order, self._done[call]) if call in self._done else None
            for call, order in enumerate(self._orders)
        ]
        return (*now, *self._before[len(now) :])


def _position(order: GlobalOrder, steps: int) -> FeedPosition:
    return FeedPosition(
        num_samples=order.num_samples, global_batch=order.global_batch, seed=order.seed,
        shuffle=order.shuffle, drop_last=order.drop_last, steps=steps,
    )  # fmt: skip


def _told(position: FeedPosition) -> str:
    order = "shuffled" if position.shuffle else "in order"
    end = ", without the last short batch" if position.drop_last else ""
    return (
        f"{position.num_samples} samples {order} under seed {position.seed} in batches of "
        f"{position.global_batch}{end}"
    )


def loaded_by_plan(
    engine: Engine,
    dataset: Dataset[Any],
    order: GlobalOrder,
    steps: range,
    settings: LoaderSettings,
    feed: int,
) -> Iterator[StepBatch]:
    """The batches of some steps; what was loaded ahead for a plan that went is loaded anew."""
    while steps:
        plan = engine.plan
        loaded = load_steps(dataset, order, steps, engine.needed_rows, settings, feed=feed)
        if engine.device.type == "cuda":
            loaded = one_ahead(loaded, CudaLane(engine.device))
        for batch in loaded:
            steps = steps[1:]
            yield batch
            if engine.plan is not plan:
                break
