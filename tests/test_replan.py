"""A running job changes its plan: the training goes on exactly, and no byte moves that need not."""

import os
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.errors import ReplanError, UsageError, WorkerFailedError
from arachne_runtime.plan.files import write
from arachne_runtime.plan.moves import Move
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.state.carry import Carrier, messages
from arachne_runtime.state.holdings import holdings
from arachne_runtime.testing import run_ranks
from bench.cases import STEPS, Case, engine_of, gap, train_plainly
from bench.exactness_replans import ReplanCase, changes_of, random_replan_case, train_through
from bench.exactness_tensor import BLOCKS

EXACT = 1e-9


def stage(layers, *replicas, **options):
    """Replicas: (share, devices)."""
    made = tuple(Replica(devices=tuple(devices), share=share) for share, *devices in replicas)
    return Stage(layers=layers, replicas=made, **options)


def plan_of(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B, rows=12):
    """Pipelines: (micro-batches, stages)."""
    made = tuple(
        Pipeline(micro_batches=count, micro_batch=sum(stages[0].shares), stages=tuple(stages))
        for count, *stages in pipelines
    )
    return Plan(model="tiny", global_batch=rows, sequence=4, schedule=schedule, pipelines=made)


CHAIN = plan_of((6, stage((0, 2), (2, "a:0")), stage((2, BLOCKS), (2, "b:0"))))
TURNED = plan_of((4, stage((0, 3), (3, "b:0")), stage((3, BLOCKS), (3, "a:0"))))
"""Here b is the first node, and its device rank 0."""
WIDE = plan_of((3, stage((0, BLOCKS), (3, "a:0"), (1, "b:0"))))


def train_and_count(case):
    """What training gave on a rank, what it held under each plan, and what it sent at each change."""
    held, said, sent, start = [], [], [], dist.batch_isend_irecv

    def counting(operations):
        sent[-1] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return start(operations)

    def seen(engine, change):
        held.append(engine.held_parts())
        sent.append(0)
        if change is not None:
            said.append((change.sent_bytes, change.moved_bytes))

    dist.batch_isend_irecv = counting
    try:
        outcome = train_through(case, seen)
    finally:
        dist.batch_isend_irecv = start
    return outcome, held, said, sent[:-1]


def least_bytes(case, wanted, held, change):
    """What the ranks lack of each parameter and its moments after a change, element by element."""
    total = 0
    for name, whole in wanted.parameters.items():
        copies = 3 if case.adam and ".fixed." not in name else 1
        for before, after in ((each[change], each[change + 1]) for each in held):
            mask = np.zeros((2, *whole.shape), dtype=bool)
            for side, parts in zip(mask, (before, after), strict=True):
                if name in parts:
                    side[np.ix_(*([i for run in runs for i in run] for runs in parts[name]))] = True
            total += copies * whole.element_size() * int((mask[1] & ~mask[0]).sum())
    return total


@pytest.mark.parametrize("index", range(6))
def test_through_random_plans_training_equals_one_process_and_moves_the_least(index):
    case = replace(random_replan_case(random.Random(index), index), blocking=False)
    wanted = train_plainly(case)
    found, held, said, sent = zip(*run_ranks(len(case.plan.devices), train_and_count, case), strict=True)
    for outcome in found:
        off = gap(outcome, wanted)
        assert max(off.loss, off.norm, off.parameter) < EXACT
    for change in range(STEPS - 1):
        least = least_bytes(case, wanted, held, change)
        assert sum(rank[change] for rank in sent) == least
        assert {rank[change][1] for rank in said} == {least}
        assert [rank[change][0] for rank in said] == [rank[change] for rank in sent]


SPLIT = plan_of((3, stage((0, BLOCKS), (3, "a:0"), (1, "a:1"), zero=1)))
SHARED = plan_of((6, stage((0, BLOCKS), (2, "a:0", "a:1"))))
SPLIT_TWICE = plan_of((2, stage((0, BLOCKS), (2, "a:1"), (4, "a:0"), zero=1)))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("plans", [(SPLIT, SHARED, SPLIT_TWICE), (SHARED, SPLIT, SPLIT_TWICE)])
@pytest.mark.parametrize("adam", [True, False])
def test_states_that_zero_splits_go_along(plans, adam):
    case = ReplanCase(plan=plans[0], next_plans=plans[1:], adam=adam, scheduled=True)
    for outcome in run_ranks(2, train_through, case):
        off = gap(outcome, train_plainly(case))
        assert max(off.loss, off.norm, off.parameter) < EXACT


def test_a_device_keeps_its_process_where_the_next_plan_numbers_it_otherwise():
    assert rank_order(CHAIN) != rank_order(TURNED)
    case = ReplanCase(plan=CHAIN, next_plans=(TURNED, WIDE), adam=True, tied=True)
    for outcome in run_ranks(2, train_through, case):
        off = gap(outcome, train_plainly(case))
        assert max(off.loss, off.norm, off.parameter) < EXACT


FROZEN_FIRST = plan_of((6, stage((0, 1), (2, "a:0")), stage((1, BLOCKS), (2, "b:0"))))


def test_a_rank_that_had_nothing_to_train_hears_what_the_optimizer_goes_by():
    case = ReplanCase(
        plan=FROZEN_FIRST, next_plans=(CHAIN, WIDE), adam=True, tied=False, frozen=(0,), scheduled=True
    )
    for outcome in run_ranks(2, train_through, case):
        off = gap(outcome, train_plainly(case))
        assert max(off.loss, off.norm, off.parameter) < EXACT


def full(plan, rank):
    raise OSError("no room for records")


def fails_then_goes_on(case, where):
    """A change fails on rank 1; the training goes on by the first plan."""
    engine = engine_of(case)
    changes, losses, told = changes_of(engine), [], ""
    unpack = Carrier._unpack
    if dist.get_rank() == 1:
        if where == "optimizer":
            make = engine.recipe.optimizer
            made = iter([make])  # called no more for the first engine

            def failing(parameters):
                next(made, None)
                raise MemoryError("no room for the optimizer")

            object.__setattr__(engine.recipe, "optimizer", failing)
        elif where == "hooks":
            changes.hooks = full
        else:
            Carrier._unpack = lambda self, message, buffer: 1 / 0
    try:
        for step in range(STEPS):
            if step:
                with pytest.raises(ReplanError) as caught:
                    changes.to(case.next_plans[step - 1])
                told = str(caught.value)
            losses.append(engine.step(case.batch(step)).loss)
    finally:
        Carrier._unpack = unpack
    assert engine.plan == case.plan
    return losses, told


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("optimizer", "process 1: MemoryError: no room"),
        ("unpack", "process 1: ZeroDivisionError"),
    ],
)
def test_a_change_that_fails_anywhere_leaves_the_old_plan_at_work(where, words):
    case = ReplanCase(plan=CHAIN, next_plans=(TURNED, WIDE), adam=True)
    wanted = train_plainly(case).losses
    for losses, told in run_ranks(2, fails_then_goes_on, case, where):
        assert np.allclose(losses, wanted, rtol=0, atol=EXACT)
        assert words in told
        assert "the job keeps its plan" in told


THREE = plan_of((6, stage((0, 2), (2, "a:0")), stage((2, 4), (2, "a:1")), stage((4, BLOCKS), (2, "a:2"))))
PAIR = plan_of((6, stage((0, 2), (2, "a:2")), stage((2, BLOCKS), (1, "a:0"), (1, "a:1"))))


def test_records_that_cannot_be_opened_keep_the_plan_before_any_group_is_formed():
    case = ReplanCase(plan=THREE, next_plans=(PAIR, PAIR), adam=True)
    for losses, told in run_ranks(3, fails_then_goes_on, case, "hooks"):
        assert np.allclose(losses, train_plainly(case).losses, rtol=0, atol=EXACT)
        assert "process 1: OSError: no room for records" in told


def breaks_off(case):
    """Rank 1 goes away when messages begin; whether the other has all that it had."""
    engine = engine_of(case)
    engine.step(case.batch(0))
    before = [(holding, holding.tensor.clone()) for holding in holdings(engine)]

    def leave(self, every):
        dist.destroy_process_group()
        raise ConnectionError("gone")

    carry = Carrier.carry
    if dist.get_rank() == 1:
        Carrier.carry = leave
    try:
        with pytest.raises(Exception, match=r"losed|gone|process group"):
            changes_of(engine).to(TURNED)
    finally:
        Carrier.carry = carry
    now = {(h.name, h.key): h.tensor for h in holdings(engine)}
    same = [
        torch.equal(now[h.name, h.key], value) and now[h.name, h.key].data_ptr() == h.tensor.data_ptr()
        for h, value in before
    ]
    return engine.plan == case.plan, len(same), all(same)


def test_a_process_that_goes_in_the_middle_takes_nothing_from_the_others():
    survivor, _ = run_ranks(2, breaks_off, Case(plan=CHAIN, adam=True))
    assert survivor[0]
    assert survivor[1] >= 30
    assert survivor[2]


def refused(case, plan_of_rank):
    changes = changes_of(engine_of(case))
    try:
        changes.to(plan_of_rank[dist.get_rank()])
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ((plan_of((6, stage((0, BLOCKS), (2, "a:0")))),) * 2, "the next plan uses a:0, but"),
        (
            (plan_of((1, stage((0, BLOCKS), (3, "a:0"), (1, "b:0"))), rows=4),) * 2,
            "global_batch 4, this job 12",
        ),
        ((WIDE, TURNED), "processes 0 and 1 were given different plans"),
    ],
)
def test_a_plan_that_a_running_job_cannot_take_is_refused_on_all_ranks(plans, words):
    assert all(words in told for told in run_ranks(2, refused, Case(plan=CHAIN), plans))


def groups_by_content(case):
    """A second group only where there are vectors: the rank of the first block has none."""

    def make(parameters):
        kinds = [[p for p in parameters if p.dim() == dim] for dim in (1, 2)]
        return torch.optim.SGD([{"params": kind} for kind in kinds if kind], lr=0.1)

    engine = engine_of(case)
    object.__setattr__(engine.recipe, "optimizer", make)
    changes = changes_of(engine)
    changes.to(WIDE)


def test_parameter_groups_that_come_and_go_are_refused():
    case = ReplanCase(plan=FROZEN_FIRST, tied=False)
    with pytest.raises(WorkerFailedError, match=r"makes 2 parameter groups .* and made 1 before"):
        run_ranks(2, groups_by_content, case)


@pytest.mark.parametrize("largest", [40, 100, 10**6])
def test_messages_hold_each_element_once_within_their_size(largest):
    whole = ((range(7),), (range(5),))
    moves = [
        Move(name=f"{size}", part=whole, source=source, target=target, nbytes=35 * size)
        for source, target in ((0, 1), (1, 0), (0, 2))
        for size in (1, 8, 4)
    ]
    every = messages(moves, largest=largest)
    assert all(message.nbytes <= largest for message in every)
    assert [m.number for m in every] == sorted(m.number for m in every)
    for move in moves:
        pieces = [p for message in every for p in message.pieces if p.move is move]
        assert [i for piece in pieces for i in piece.elements] == list(range(35))
    for message in every:  # a typed view of the buffer begins at a multiple of its element
        offset = 0
        for piece in message.pieces:
            assert offset % piece.move.itemsize == 0
            offset += piece.nbytes


def tiny():
    return nn.Sequential(*(nn.Linear(3, 3, bias=i % 2 == 0) for i in range(BLOCKS)))


class Numbered:
    """Samples that say which they are."""

    def __len__(self):
        return 42

    def __getitem__(self, index):
        return torch.randn(3, generator=torch.Generator().manual_seed(index)).double(), index


def loop(session, change):
    """The user's loop: it knows of no plan. Returns losses, samples read here, and changes heard of."""
    engine = session.engine(
        tiny,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        loss=lambda output, batch: output.square().mean(),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        dtype=torch.float64,
        clip_norm=0.5,
    )
    losses, heard = [], []
    change(session, engine, heard)
    for batch in session.batches(Numbered(), 12, seed=4, epochs=2):
        losses.append(engine.step(batch).loss)
    return losses, heard, [g["lr"] for g in engine.optimizer.param_groups]


def follows(first):
    def watch(session, engine, heard):
        wishes = {2: WIDE, 5: TURNED} if session.rank == 1 else {}
        session.watch_plan(lambda: wishes.pop(engine.num_steps, None))
        session.on_replan(lambda change: heard.append((change.step, change.new == engine.plan)))

    with arachne.Session(first, device="cpu") as session:
        return loop(session, watch)


def test_a_loop_goes_on_at_the_next_sample_when_a_rank_finds_another_plan():
    with arachne.Session() as session:
        losses, _, rates = loop(session, lambda *_: None)
    for found, heard, lr in run_ranks(2, follows, CHAIN):
        assert np.allclose(found, losses, rtol=0, atol=EXACT)
        assert heard == [(3, True), (6, True)]
        assert lr == rates


def follows_a_file(path):
    def watch(session, engine, heard):
        session.watch_plan(path)
        session.on_replan(lambda change: heard.append(change.step))
        engine.after_step.append(
            lambda report, _: report.step == 3 and session.rank == 0 and write(WIDE, path)
        )

    with arachne.Session(CHAIN, device="cpu") as session:
        return loop(session, watch)


def test_a_plan_file_that_changes_is_followed(tmp_path: Path):
    write(CHAIN, tmp_path / "plan.json")
    with arachne.Session() as session:
        losses, _, _ = loop(session, lambda *_: None)
    for found, heard, _ in run_ranks(2, follows_a_file, tmp_path / "plan.json"):
        assert np.allclose(found, losses, rtol=0, atol=EXACT)
        assert len(heard) == 1
        assert heard[0] >= 5


def open_records(folder):
    """How many files of records are open behind some changes of plan."""
    with arachne.Session(CHAIN, device="cpu", trace=folder) as session:
        session.engine(tiny, optimizer=torch.optim.SGD, loss=lambda y, x: y.square().mean())
        for plan in (WIDE, CHAIN, WIDE):
            session.replan(plan)
        held = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    return sum(name.startswith(str(folder)) for name in held)


def test_an_engine_that_goes_closes_its_records(tmp_path: Path):
    assert run_ranks(2, open_records, tmp_path) == [1, 1]
