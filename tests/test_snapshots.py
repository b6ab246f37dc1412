"""The last holder of a block dies: the job goes back to the newest copy that all who live have."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from arachne_runtime.errors import LostStateError
from arachne_runtime.membership.watch import break_group
from arachne_runtime.state import buddy as buddy_module
from arachne_runtime.state.buddies import Buddies, Room, free_bytes
from arachne_runtime.state.buddy import Snapshots, go_on_or_back
from arachne_runtime.state.feeds import Feeds
from arachne_runtime.state.old import Old
from arachne_runtime.state.packed import packed, unpacked
from arachne_runtime.state.replan import replan
from arachne_runtime.state.words import Progress
from arachne_runtime.surroundings import lone_plan
from arachne_runtime.testing import run_ranks
from bench.cases import engine_of
from bench.exactness_replans import ReplanCase
from bench.exactness_tensor import BLOCKS

from .test_replan import EXACT, plan_of, stage
from .test_replan_processes import DEVICES, Worlds, copies, make, node

NUM_STEPS, EVERY, DEATH = 7, 2, 5
"""Of the training; from copy to copy; done when a process dies, behind the copy at 4."""
CHAIN = plan_of((6, stage((0, 1), (2, "a:0")), stage((1, 3), (2, "b:0")), stage((3, BLOCKS), (2, "a:1"))))
"""Processes 0, 1 and 2, in another order of ranks: a:0, a:1, b:0."""
FEWER = plan_of((4, stage((0, 4), (3, "a:0")), stage((4, BLOCKS), (1, "a:1"), (2, "b:1"))))
"""Processes 0, 2 and 3, which joins."""
PAIR = plan_of((6, stage((0, 2), (2, "a:0")), stage((2, BLOCKS), (2, "b:0"))))
CASE = ReplanCase(plan=CHAIN, adam=True, scheduled=True, rows=(12,) * NUM_STEPS)


def undisturbed():
    engine = engine_of(replace(CASE, plan=lone_plan(BLOCKS)))
    losses = [engine.step(CASE.batch(step)).loss for step in range(NUM_STEPS)]
    engine.close()
    return losses


def train(engine, snapshots, losses, stop, slow=None):
    while engine.num_steps < stop:
        snapshots.before_step(engine, Feeds())
        if slow != engine.num_steps:
            snapshots.wait()
        step = engine.num_steps
        losses[step] = engine.step(CASE.batch(step)).loss


def enter(snapshots, engine):
    return snapshots.enter(engine, DEVICES[dist.get_rank()][0], timeout_s=20)


def dies(breaks):
    """Losses by step, before and after the death of b:0, and where the job went back to."""
    worlds, before, after = Worlds(), {}, {}
    snapshots, engine, exchanged = (
        Snapshots(every=EVERY, break_group=break_group),
        None,
        buddy_module.exchanged,
    )
    if worlds.process < 3:
        with worlds.entered([0, 2, 1], 1):
            engine = engine_of(CASE)
            (group,) = enter(snapshots, engine)
            if breaks and worlds.process == 1:
                buddy_module.exchanged = lambda mine, *rest: (
                    exchanged(mine, *rest) if engine.num_steps < 4 else break_group(rest[0])
                )
            train(engine, snapshots, before, DEATH, slow=4 if breaks else None)
            break_group(group)
            snapshots.leave()
            engine.close()
    buddy_module.exchanged = exchanged
    if worlds.process == 1:
        return None
    random.seed(7)
    with worlds.entered([0, 2, 3], 2) as together:
        old = Old.of(engine) if engine is not None else None
        change, back = go_on_or_back(
            lambda old: replan(old, make(CASE, FEWER), together, node([0, 2, 3])), old, snapshots, together
        )
        engine = change.commit(engine)
        assert engine.num_steps == back
        if worlds.process < 3:  # the script does not go back
            assert random.random() == random.Random(7).random()
        groups = enter(snapshots, engine)
        train(engine, snapshots, after, NUM_STEPS)
        kept = [copy.num_steps for copy in snapshots._kept]
        break_group(*groups)
        snapshots.leave()
        engine.close()
    return before, after, back, kept


@pytest.mark.parametrize("breaks", [False, True])
def test_the_death_of_the_last_holder_of_a_block_goes_back_to_the_newest_whole_copy(breaks):
    wanted = undisturbed()
    back = 2 if breaks else 4
    *survivors, joiner = [found for found in run_ranks(4, dies, breaks) if found is not None]
    for before, after, went_to, kept in survivors:
        assert went_to == back
        assert list(before) == list(range(DEATH))
        assert list(after) == list(range(back, NUM_STEPS))
        for losses in (before, after):
            assert np.allclose(list(losses.values()), [wanted[step] for step in losses], rtol=0, atol=EXACT)
        assert kept == [6]  # every older one was let go
    assert joiner[1:] == survivors[0][1:]
    assert joiner[0] == {}


def copied_steps(engine, snapshots, num_steps):
    """Steps with a whole copy, at each step."""
    for step in range(num_steps):
        snapshots.before_step(engine, Feeds())
        snapshots.wait()
        yield [copy.num_steps for copy in snapshots._kept if copy.is_whole]
        engine.step(CASE.batch(step))


def fails(name):
    """On one rank there is no memory for a copy, its own or that of another, before step 1."""
    snapshots, function, guarded = Snapshots(1, break_group), getattr(buddy_module, name), []
    engine = engine_of(replace(CASE, plan=PAIR))
    snapshots.enter(engine, DEVICES[dist.get_rank()][0], 20, guarded.append)
    if dist.get_rank() == 1:
        setattr(buddy_module, name, lambda *given: function(*given) if engine.num_steps != 1 else 1 / 0)
    try:
        with pytest.warns(UserWarning, match="the snapshot before stays the newest"):
            kept = list(copied_steps(engine, snapshots, 5))
    finally:
        setattr(buddy_module, name, function)
    snapshots.leave()
    engine.close()
    return kept, len(guarded)


def test_a_copy_that_fails_on_one_rank_leaves_the_one_before_and_the_next_one_counts():
    """In the background the group breaks: at the next copy all form another."""
    assert run_ranks(2, fails, "packed") == [([[0], [0], [2], [3], [4]], 1)] * 2
    assert run_ranks(2, fails, "exchanged") == [([[0], [0], [0], [3], [4]], 2)] * 2


def tries_what_any_has():
    """In the first copy after a join one has counted it, and the other only has the one before."""
    worlds, snapshots, tried = Worlds(), Snapshots(every=EVERY, break_group=break_group), []

    def change(old):
        tried.append(old.progress.num_steps if old is not None else None)
        if len(tried) < enough:
            raise LostStateError("lost", ("weight",))
        return "found"

    with worlds.entered([0, 1], 1) as together:
        with pytest.raises(LostStateError, match="no snapshot is whole on any process"):
            snapshots.candidates(together)
        step = (8, 4)[worlds.process]
        pack = packed(Old(holdings=(), scalars={}, progress=Progress(num_steps=step)))
        snapshots._kept.append(buddy_module.Copy(step, [pack], is_whole=True))
        enough = 4
        with pytest.raises(LostStateError, match="no snapshot has all of the state") as caught:
            go_on_or_back(change, None, snapshots, together)
        assert caught.value.names == ("weight",)
        tried.clear()
        enough = 3
        found = go_on_or_back(change, None, snapshots, together)
    return found, tried, [copy.num_steps for copy in snapshots._kept]


def test_all_try_the_newest_copy_that_any_has_and_then_the_one_before():
    assert run_ranks(2, tries_what_any_has) == [
        (("found", 4), [None, 8, None], []),
        (("found", 4), [None, None, 4], [4]),
    ]


def test_a_copy_is_in_other_memory_and_equal():
    engine = engine_of(replace(CASE, plan=lone_plan(BLOCKS), dtype=torch.float32))
    engine.step(
        {key: value.float() if value.is_floating_point() else value for key, value in CASE.batch(0).items()}
    )
    held = copies(engine)
    old = unpacked(packed(Old.of(engine)))
    engine.step(
        {key: value.float() if value.is_floating_point() else value for key, value in CASE.batch(1).items()}
    )
    assert old.is_kept
    assert old.progress.num_steps == 1
    assert len(old.holdings) == len(held)
    for each in old.holdings:
        assert torch.equal(each.tensor, held[each.name, each.key][1])
        assert each.tensor.data_ptr() != held[each.name, each.key][0].data_ptr()
    engine.close()


def rooms(*told):
    return [Room(node=node, nbytes=nbytes, free_bytes=free) for node, nbytes, free in told]


def test_a_copy_goes_to_another_node_with_room():
    found = Buddies.of(rooms(("a", 10, 1000), ("a", 10, 1000), ("b", 10, 100), ("c", 10, 500)))
    assert found.of_rank == (3, 3, 0, 0) or found.of_rank[:2] == (3, 3)
    assert all(ward in (0, 1, 2) for ward in found.wards(3))
    assert Buddies.of(rooms(("a", 10, 100), ("a", 10, 100))).of_rank == (1, 0)
    assert Buddies.of(rooms(("a", 10, 100))).of_rank == (0,)
    assert Buddies.of(rooms(("a", 10, 100))).wards(0) == ()
    assert Buddies.of(rooms(("a", 10, 100), ("b", 10, 39))) is None
    assert Buddies.of(rooms(("a", 10, 100), ("b", 10, 40))).of_rank == (1, 0)


def test_what_a_host_can_give_is_more_than_nothing():
    assert free_bytes() > 2**20


def keeps_what_it_may_need():
    """Steps of which a copy may be needed: those since the oldest; none in a job of one process."""
    worlds, snapshots, kept = Worlds(), Snapshots(every=3, break_group=break_group), []
    feeds = Feeds(keeps_batches=True)
    with worlds.entered([0, 1], 1):
        engine = engine_of(replace(CASE, plan=PAIR))
        engine.on_applied.append(feeds.after_step)
        enter(snapshots, engine)
        for step in range(5):
            snapshots.before_step(engine, feeds)
            assert snapshots.wait()
            engine.step(CASE.batch(step))
            kept.append((snapshots._kept[0].num_steps, sorted(feeds._trained)))
        snapshots.leave()
        engine.close()
    if worlds.process == 0:
        with worlds.entered([0], 2):
            engine = engine_of(replace(CASE, plan=lone_plan(BLOCKS)))
            engine.on_applied.append(feeds.after_step)
            assert enter(snapshots, engine) == ()
            snapshots.before_step(engine, feeds)
            assert snapshots._kept == []
            snapshots.leave()
            engine.close()
    return kept


def test_what_was_trained_on_since_the_oldest_copy_is_kept():
    wanted = [(0, [0]), (0, [0, 1]), (0, [0, 1, 2]), (3, [0, 1, 2, 3]), (3, [3, 4])]
    assert run_ranks(2, keeps_what_it_may_need) == [wanted, wanted]
