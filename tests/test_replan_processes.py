"""Processes come and go while a job changes its plan: who stays, who joins, who only sends, what is lost."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from arachne_runtime.errors import LostStateError, ReplanError
from arachne_runtime.measure.together import Together
from arachne_runtime.membership.watch import break_group, form_world, leave_world
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.state.bring import bring
from arachne_runtime.state.carry import Carrier
from arachne_runtime.state.holdings import holdings
from arachne_runtime.state.job import FeedPosition
from arachne_runtime.state.lost import refuse_lost_shards
from arachne_runtime.state.old import Old
from arachne_runtime.state.replan import replan
from arachne_runtime.state.words import Progress, Word
from arachne_runtime.testing import run_ranks
from bench.cases import STEPS, Outcome, engine_of, gap, train_plainly
from bench.exactness_replans import ReplanCase
from bench.exactness_tensor import BLOCKS

from .test_replan import EXACT, plan_of, stage

DEVICES = ("a:0", "b:0", "a:1", "b:1")
"""By number of the process, which it keeps whatever world it is in."""


class Worlds:
    """The groups of one process, one after the other."""

    def __init__(self) -> None:
        self.process = dist.get_rank()
        self.store = dist.distributed_c10d._get_default_store()
        self.generation = 0
        leave_world()

    @contextmanager
    def entered(self, members, generation=0) -> Iterator[Together]:
        """The world of some processes, in this order; all of them enter it, and meet before they leave."""
        self.generation = generation or self.generation + 1
        rank = members.index(self.process)
        form_world(self.store, self.generation, rank, len(members), form_s=20, timeout_s=20)
        try:
            yield Together.of_default_group()
            if dist.is_initialized():
                dist.barrier()
        finally:
            leave_world()


def members_of(plan) -> list[int]:
    return [DEVICES.index(device) for device in rank_order(plan)]


def position(steps) -> tuple[FeedPosition | None, ...]:
    same = {"num_samples": 36, "global_batch": 12, "seed": 1, "shuffle": True, "drop_last": False}
    return (None, FeedPosition(**same, steps=steps))


def node(members):
    return lambda process: node_of(DEVICES[members[process]])


def make(case, plan):
    return lambda values: engine_of(replace(case, plan=plan), values)


def brought(old, case, plan, everyone, worlds, generation):
    """Where a process that has something is not in the plan: all that anybody has, in a larger world."""
    summed = ModelParts.of(case.model).summed()
    processes = [everyone.index(process) for process in members_of(plan)]
    with worlds.entered(everyone, generation) as together:
        return bring(old, plan, summed, processes, together, node(everyone))


def train(case):
    """A step by each plan; a process that is not in one has nothing afterwards."""
    worlds, engine, outcome, heard = Worlds(), None, Outcome(losses={}), []
    before = ()
    for step, plan in enumerate((case.plan, *case.next_plans)):
        members, old = members_of(plan), None
        everyone = (*members, *(process for process in before if process not in members))
        if engine is not None:
            old = Old.of(engine, feeds=position(step), notes=b"said")
        if len(everyone) > len(members) and worlds.process in everyone:
            old = brought(old, case, plan, everyone, worlds, 100 + step)
        before = members
        if worlds.process not in members:
            engine = None
            continue
        with worlds.entered(members, 1 + step) as together:
            if step:
                change = replan(old, make(case, plan), together, node(members))
                heard.append((change.heard.num_steps, change.heard.feeds[1].steps, change.heard.notes))
                engine = change.commit(engine)
            else:
                engine = engine_of(case)
            outcome.losses[step] = engine.step(case.batch(step)).loss
            engine.close()
    if engine is not None:
        outcome.parameters = {name: p.detach().clone() for name, p in engine.named_parameters()}
        outcome.held = engine.held_parts()
    return outcome, heard


PAIR = plan_of((6, stage((0, 2), (2, "a:0")), stage((2, BLOCKS), (2, "b:0"))))
MORE = plan_of(
    (2, stage((0, 3), (3, "a:0", "a:1")), stage((3, BLOCKS), (3, "b:0"))), (6, stage((0, BLOCKS), (1, "b:1")))
)
"""Two processes join, one of them shares blocks with another."""
FEWER = plan_of((4, stage((0, 1), (3, "b:1")), stage((1, BLOCKS), (2, "a:0"), (1, "a:1"))))
"""The process of b:0 goes, and all that it has is held by others too."""
LAST = plan_of((4, stage((0, BLOCKS), (1, "b:0"), (2, "b:1"))))
"""The processes of a go, which alone have the last blocks: they only send. b:0 comes back with nothing."""


@pytest.mark.parametrize("plans", [(PAIR, MORE, FEWER), (MORE, FEWER, LAST), (FEWER, LAST, PAIR)])
def test_processes_join_and_go_and_training_equals_one_process(plans):
    case = ReplanCase(plan=plans[0], next_plans=plans[1:], adam=True, scheduled=True)
    wanted, found = train_plainly(case), run_ranks(4, train, case)
    losses = {}
    for process, (outcome, heard) in enumerate(found):
        for step, loss in outcome.losses.items():
            assert abs(loss - wanted.losses[step]) < EXACT
            losses[step] = loss
        joined = [step for step, plan in enumerate(plans) if step and process in members_of(plan)]
        assert heard == [(step, step, b"said") for step in joined]
        if outcome.parameters:
            off = gap(replace(outcome, losses=[], norms=[]), replace(wanted, losses=[], norms=[]))
            assert off.parameter < EXACT
    assert sorted(losses) == list(range(STEPS))


WHOLE = plan_of((6, stage((0, BLOCKS), (1, "a:0"), (1, "a:1"))))


def loses(case):
    """b:0 dies with its blocks; what the others say of it, and whether they have all that they had."""
    worlds, engine = Worlds(), None
    if worlds.process in (0, 1):
        with worlds.entered([0, 1], 1):
            engine = engine_of(case)
            engine.step(case.batch(0))
            engine.close()
    if worlds.process == 1:
        return None
    before = copies(engine) if engine is not None else {}
    with worlds.entered([0, 2], 2) as together:
        old = Old.of(engine) if engine is not None else None
        with pytest.raises(LostStateError, match=r"nobody has blocks\.2\..* more, which process 0") as caught:
            replan(old, make(case, WHOLE), together, node([0, 2]))
    return caught.value.names, is_whole(engine, before) if engine is not None else True


def copies(engine):
    return {(h.name, h.key): (h.tensor, h.tensor.clone()) for h in holdings(engine)}


def is_whole(engine, before):
    """The same numbers in the same memory."""
    now = {(h.name, h.key): h.tensor for h in holdings(engine)}
    return now.keys() == before.keys() and all(
        now[key].data_ptr() == tensor.data_ptr() and torch.equal(now[key], value)
        for key, (tensor, value) in before.items()
    )


def test_parts_that_nobody_has_are_told_to_all_alike():
    survivor, dead, joiner = run_ranks(3, loses, ReplanCase(plan=PAIR, adam=True, tied=False))
    assert dead is None
    assert survivor == joiner
    names, whole = survivor
    assert whole
    assert {name.split(".")[1] for name in names} == {"2", "3", "4"}


APART = plan_of(
    (3, stage((0, 2), (2, "a:0")), stage((2, BLOCKS), (2, "b:0"))), (6, stage((0, BLOCKS), (1, "a:1")))
)
TOGETHER = plan_of((3, stage((0, BLOCKS), (1, "a:0"), (2, "b:0"), (1, "a:1"))))
SURVIVORS = plan_of((3, stage((0, BLOCKS), (1, "a:0"), (3, "b:0"))))


def dies_in_the_middle(case):
    """The process of a:1 goes when its messages are under way; the others change to a plan without it."""
    worlds, engine = Worlds(), None
    dies, carry = worlds.process == 2, Carrier.carry

    def leave(self, every):
        for alike in [message for message in every if message.source == 2][:1]:
            self._start([alike])
        leave_world()
        raise ConnectionError("gone")

    with worlds.entered([0, 2, 1], 1):
        engine = engine_of(case)
        losses = [engine.step(case.batch(0)).loss]
        engine.close()
    before, old = copies(engine), Old.of(engine)
    Carrier.carry = leave if dies else carry
    with suppress(RuntimeError), worlds.entered([0, 2, 1], 2) as together:
        try:
            with pytest.raises((ConnectionError, RuntimeError)) as caught:
                replan(old, make(case, TOGETHER), together, node([0, 2, 1]))
        finally:
            Carrier.carry = carry
            if dist.is_initialized():
                break_group(dist.group.WORLD)
    if dies:
        return None
    assert not isinstance(caught.value, ReplanError)
    whole = is_whole(engine, before)
    with worlds.entered([0, 1], 3) as together:
        engine = replan(old, make(case, SURVIVORS), together, node([0, 1])).commit(engine)
        losses += [engine.step(case.batch(step)).loss for step in (1, 2)]
        engine.close()
    return whole, losses


def test_a_death_in_the_middle_of_it_leaves_the_others_all_that_they_had():
    case = ReplanCase(plan=APART, adam=True)
    first, second, dead = run_ranks(3, dies_in_the_middle, case)
    assert dead is None
    for whole, losses in (first, second):
        assert whole
        assert np.allclose(losses, train_plainly(case).losses, rtol=0, atol=EXACT)


def drops_then_goes_on(case):
    """A change for which all is there, but which does not count."""
    worlds = Worlds()
    with worlds.entered([0, 1], 1) as together:
        engine = engine_of(case)
        losses = [engine.step(case.batch(0)).loss]
        before, draws = copies(engine), torch.get_rng_state()
        replan(Old.of(engine), make(case, SURVIVORS), together, node([0, 1])).drop()
        assert is_whole(engine, before)
        assert torch.equal(draws, torch.get_rng_state())
        losses += [engine.step(case.batch(step)).loss for step in (1, 2)]
        engine.close()
    return losses


def test_a_change_that_is_dropped_leaves_the_old_plan_at_work():
    case = ReplanCase(plan=PAIR, adam=True, scheduled=True)
    for losses in run_ranks(2, drops_then_goes_on, case):
        assert np.allclose(losses, train_plainly(case).losses, rtol=0, atol=EXACT)


def unlike_steps(case):
    engine = engine_of(case)
    engine.num_steps = dist.get_rank()
    with pytest.raises(ReplanError, match="processes 0 and 1 are not between the same two steps: 0 steps"):
        replan(Old.of(engine), make(case, SURVIVORS), Together.of_default_group(), lambda process: 0)
    engine.close()


def test_processes_between_other_steps_are_refused():
    run_ranks(2, unlike_steps, ReplanCase(plan=PAIR))


def draws(case, alike):
    """What each process draws when one has joined; before, the last of the two that train may draw more."""
    worlds = Worlds()
    engine = None
    if worlds.process in (0, 1):
        with worlds.entered([0, 1], 1):
            engine = engine_of(case)
            engine.close()
        torch.manual_seed(9)
        torch.rand(7 if alike else 7 + worlds.process)
    with worlds.entered([0, 2, 1], 2) as together:
        old = Old.of(engine) if engine is not None else None
        replan(old, make(case, TOGETHER), together, node([0, 2, 1])).commit(engine).close()
    return torch.rand(1).item()


@pytest.mark.parametrize("alike", [True, False])
def test_one_that_joins_draws_as_the_others_do_where_they_are_alike(alike):
    first, second, joined = run_ranks(3, draws, ReplanCase(plan=PAIR), alike)
    assert (first == second) is alike
    assert (joined == first) is alike


def word(shards):
    return Word(progress=Progress(num_steps=3, shards=shards))


def test_states_that_only_a_missing_rank_had_under_zero_are_lost():
    whole = [word(((0, 0, 1),)), word(((1, 0, 1),)), Word()]
    refuse_lost_shards(whole)
    refuse_lost_shards([word(()), Word()])
    refuse_lost_shards([word(((0, 0, 1), (1, 0, 1))), Word()])  # from the copy that a buddy kept
    with pytest.raises(LostStateError, match="ZeRO gave to rank 1 of the old one"):
        refuse_lost_shards([whole[0], Word()])
