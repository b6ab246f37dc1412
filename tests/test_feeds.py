"""Where a job is in its data: steps that are done again, under another plan, and processes that join."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

import arachne_runtime as arachne
from arachne_runtime.data import GlobalOrder, LoaderSettings
from arachne_runtime.data.loader import LoadedRows
from arachne_runtime.elastic.entering import Entry
from arachne_runtime.elastic.survivor import Survivor
from arachne_runtime.errors import UsageError
from arachne_runtime.membership.client import RefusedError
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


def test_batches_of_a_script_are_kept_though_it_fills_their_memory_again():
    with arachne.Session(device="cpu") as session:
        engine = session.engine(tiny, optimizer=torch.optim.SGD, loss=squared)
        feeds = Feeds(keeps_batches=True)
        engine.after_step.append(feeds.after_step)
        data = torch.empty(4, 3)
        for step in range(3):
            engine.step(data.fill_(step))
        assert [batch.tree.unique().tolist() for batch in feeds.since(1, engine)] == [[1.0], [2.0]]
        stranger = LoadedRows(12, ())
        assert feeds.reload(stranger, engine) is stranger


def opened(feeds, order):
    return feeds.open(Numbered(), order, LoaderSettings())[0]


def train_on(feeds, call, steps):
    """As far as so many steps of the call."""
    batch = LoadedRows(12, (), step=steps - 1, feed=call.number)
    feeds.after_step(SimpleNamespace(step=steps - 1), batch)


def joined():
    """What a process that joins reads first; it is alone in what it does: a collective would not return."""
    if dist.get_rank() == 0:
        return None
    feeds = Feeds()
    trained = Feeds()
    calls = [opened(trained, order) for order in (ORDER, replace(ORDER, seed=5))]
    for call, steps in zip(calls, (4, 3), strict=True):
        train_on(trained, call, steps)
    feeds.go_on(trained.positions())
    starts = [feeds.open(Numbered(), replace(ORDER, seed=seed), LoaderSettings())[1] for seed in (4, 5, 6)]
    assert feeds.positions() == trained.positions()
    return starts


def test_one_that_joins_begins_where_the_others_are_without_asking():
    assert run_ranks(2, joined, timeout_s=20) == [None, [4, 3, 0]]


def test_calls_for_evaluation_move_no_position():
    """Of two processes one evaluated twice in the first phase, the other joined behind that."""
    checks = replace(ORDER, shuffle=False)
    there, joiner = Feeds(), Feeds()
    first = opened(there, ORDER)
    for steps in (2, 4):
        train_on(there, first, steps)
        opened(there, checks)
    joiner.go_on(there.positions())
    assert joiner.open(Numbered(), ORDER, LoaderSettings())[1] == 4
    opened(there, checks)  # one rank is at its evaluation, the other not yet
    assert joiner.positions() == there.positions()
    for feeds in (there, joiner):
        train_on(feeds, opened(feeds, replace(ORDER, seed=9)), 3)
    assert joiner.positions() == there.positions()
    resumed = Feeds()
    resumed.go_on(there.positions())
    starts = [resumed.open(Numbered(), replace(ORDER, seed=seed), LoaderSettings())[1] for seed in (4, 9)]
    assert starts == [4, 3]


def test_calls_with_one_order_are_told_apart():
    feeds = Feeds()
    for steps in (4, 2):
        train_on(feeds, opened(feeds, ORDER), steps)
    older = tuple(msgspec.structs.replace(position, repeat=0) for position in feeds.positions())
    for positions in (feeds.positions(), (older[0], None, older[1])):
        again = Feeds()
        again.go_on(positions)
        assert [again.open(Numbered(), ORDER, LoaderSettings())[1] for _ in range(3)] == [4, 2, 0]


def test_a_call_that_trains_in_place_of_another_is_refused():
    trained, other = Feeds(), Feeds()
    train_on(trained, opened(trained, ORDER), 4)
    other.go_on(trained.positions())
    call = opened(other, replace(ORDER, seed=5))
    with pytest.raises(UsageError, match=r"under seed 5 .* but had 42 samples shuffled under seed 4"):
        train_on(other, call, 1)


def test_one_that_joined_cannot_do_again_what_came_before():
    feeds, engine = Feeds(keeps_batches=True), SimpleNamespace(num_steps=8, discard=lambda: None)
    survivor = Survivor(None, None, None, SimpleNamespace(feeds=feeds), engine=engine)
    feeds.forget(9)  # as one that came then
    entry = Entry(rank=1, engine=engine, change=None, back=8)
    with pytest.raises(RefusedError, match="goes back to step 8"):
        survivor._go_back(SimpleNamespace(generation=2), entry)
    engine.num_steps = 9
    survivor._go_back(SimpleNamespace(generation=2), entry)
