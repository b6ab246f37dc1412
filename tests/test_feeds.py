"""Where a job is in its data: steps that are done again, under another plan, and processes that join."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import arachne_runtime as arachne
from arachne_runtime.data import GlobalOrder, LoaderSettings
from arachne_runtime.data.loader import LoadedRows
from arachne_runtime.errors import UsageError
from arachne_runtime.state.feeds import Feeds
from arachne_runtime.testing import run_ranks

from .test_replan import CHAIN, WIDE, Numbered, tiny

ORDER = GlobalOrder(num_samples=42, global_batch=12, seed=4)


def squared(output, batch):
    return output.square().mean()


def numbers_of(batch):
    return [i for _, (_, numbers) in batch.pieces for i in numbers.tolist()]


def done_again(num_workers):
    """Rows of step 1 by the first plan, by the next one, and those that `since` gives of steps 1 and 2."""
    with arachne.Session(CHAIN, device="cpu") as session:
        engine = session.engine(tiny, optimizer=torch.optim.SGD, loss=squared, dtype=torch.float64)
        feeds = session._feeds
        feeds.keeps_batches = True
        engine.after_step.insert(0, feeds.after_step)
        kept, found = None, []
        for batch in session.batches(Numbered(), 12, seed=4, num_workers=num_workers):
            if engine.num_steps == 1:
                kept = feeds.positions()
                found.append(numbers_of(batch))
                assert feeds.reload(batch, engine) is batch
                session.replan(WIDE)
                batch = feeds.reload(batch, engine)
                found.append(numbers_of(batch))
            engine.step(batch)
            if engine.num_steps == 3:
                break
        feeds.go_back(kept)
        assert feeds.positions()[0].steps == 1
        again = list(feeds.since(1, engine))
        found += map(numbers_of, again)
        for step, batch in enumerate(again, 2):
            engine.step(batch)
            assert feeds.positions()[0].steps == step
        feeds.forget(3)
        with pytest.raises(UsageError, match="the batch of step 2 was forgotten; the oldest is 3"):
            list(feeds.since(2, engine))
        return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_is_done_again_with_the_rows_of_another_plan(num_workers):
    (first, *mine), (second, *theirs) = run_ranks(2, done_again, num_workers)
    wanted = [ORDER.samples(step, range(12)) for step in (1, 1, 2)]
    assert first == second == wanted[0]  # both ends of a pipeline read all samples
    for here, there, all_of_step in zip(mine, theirs, wanted, strict=True):
        assert len(here) == 9
        assert sorted(here + there) == sorted(all_of_step)


def test_batches_that_hold_all_rows_are_kept_as_they_are():
    with arachne.Session(device="cpu") as session:
        engine = session.engine(tiny, optimizer=torch.optim.SGD, loss=squared)
        feeds = Feeds(keeps_batches=True)
        engine.after_step.append(feeds.after_step)
        data = [torch.full((4, 3), float(step)) for step in range(3)]
        for batch in data:
            engine.step(batch)
        assert [batch.tree is data[step] for step, batch in enumerate(feeds.since(1, engine), 1)] == [
            True
        ] * 2
        stranger = LoadedRows(12, ())
        assert feeds.reload(stranger, engine) is stranger


def joined():
    """What a process that joins reads first; it is alone in what it does: a collective would not return."""
    if dist.get_rank() == 0:
        return None
    feeds = Feeds()
    trained = Feeds()
    for order in (ORDER, replace(ORDER, seed=5)):
        trained.open(Numbered(), order, LoaderSettings())
    trained._done = {0: 4, 1: 3}
    feeds.go_on(trained.positions())
    starts = [feeds.open(Numbered(), replace(ORDER, seed=seed), LoaderSettings())[1] for seed in (4, 5, 6)]
    assert feeds.positions() == (*trained.positions(), None)
    return starts


def test_one_that_joins_begins_where_the_others_are_without_asking():
    assert run_ranks(2, joined, timeout_s=20) == [None, [4, 3, 0]]
