"""From what a script says of its data to the batches that it trains on."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from .data import GlobalOrder, LoaderSettings, StepBatch
from .data.loader import num_samples_of
from .engine import Engine
from .engine.recipe import refuse_no_integers
from .errors import UsageError
from .plan.plan import Plan
from .state.feeds import Feeds, loaded_by_plan
from .surroundings import LONE_DEVICE


def batches_of(
    engine: Engine,
    feeds: Feeds,
    dataset: Dataset[Any],
    global_batch: int,
    settings: LoaderSettings,
    *,
    seed: int,
    epochs: int,
    start: int,
    drop_last: bool,
    shuffle: bool,
) -> Iterator[StepBatch]:
    """As ``Session.batches``, for the engine that trains on them; UsageError as there."""
    refuse_no_integers(
        global_batch=global_batch, seed=seed, epochs=epochs, start=start, num_workers=settings.num_workers
    )
    _refuse_other_batch(engine.plan, global_batch)
    order = GlobalOrder(
        num_samples=num_samples_of(dataset),
        global_batch=global_batch,
        seed=seed,
        drop_last=drop_last,
        shuffle=shuffle,
    )
    steps = epochs * order.steps_per_epoch
    if not 0 <= start <= steps:
        raise UsageError(f"start={start} is not within the {steps} steps of {epochs} epochs")
    feed, done = feeds.open(dataset, order, settings)
    rest = range(min(max(start, done), steps), steps)
    return loaded_by_plan(engine, feed, rest)


def _refuse_other_batch(plan: Plan, global_batch: int) -> None:
    if plan.devices != (LONE_DEVICE,) and global_batch != plan.global_batch:
        raise UsageError(
            f"global_batch={global_batch}, but the plan is for {plan.global_batch}; pass "
            f"global_batch={plan.global_batch}, or plan again with --global-batch {global_batch}"
        )
