"""What a change of plan sends: against counting every element, one by one."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.moves import Kept, kept_between, moves_of
from arachne_runtime.plan.order import Summed
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.shards import Axis, ParameterForm, Split
from tests.strategies import plans

DEVICES = ("a:0", "a:1", "b:0", "b:1", "b:2", "c:0")
PROCESS_OF = {device: number for number, device in enumerate(DEVICES)}


def node(process):
    return node_of(DEVICES[process])


def model_of(num_blocks, *, tied):
    """Of each block a fused q, k, v with fewer k and v heads, one cut across, a norm, a table."""
    heads = Split(Axis.TENSOR, 0, (48, 24, 24), (12, 6, 6), repeats=True)
    blocks = []
    for block in range(num_blocks):
        tie = "blocks.0.table" if tied and block in (0, num_blocks - 1) else None
        blocks.append(
            (
                ParameterForm(f"blocks.{block}.qkv", (96, 3), 4, splits=(heads,)),
                ParameterForm(
                    f"blocks.{block}.out", (3, 24), 8, splits=(Split(Axis.TENSOR, 1, (24,), (24,)),)
                ),
                ParameterForm(f"blocks.{block}.norm", (5,), 4),
                ParameterForm(f"blocks.{block}.table", (13, 2), 4, tie=tie),
            )
        )
    return Summed.of(blocks)


@st.composite
def changes(draw):
    num_blocks = draw(st.integers(1, 4))
    old, new = (draw(plans(num_blocks=num_blocks, devices=DEVICES, max_chunks=2)) for _ in range(2))
    model = model_of(num_blocks, tied=num_blocks > 1 and draw(st.booleans()))
    return old, new, model


def elements(parts, shape):
    """Which elements of a tensor each process has."""
    found = {process: np.zeros(shape, dtype=bool) for process in range(len(DEVICES))}
    for process, mine in parts.items():
        for part in mine:
            found[process][np.ix_(*([i for run in runs for i in run] for runs in part))] = True
    return found


@given(changes(), st.sets(st.integers(0, 5), max_size=2))
@settings(max_examples=60)
def test_each_byte_that_a_receiver_lacks_is_sent_once_and_nothing_else(change, dead):
    tensors = kept_between(*change, PROCESS_OF)
    found = moves_of(tensors, node_of=node, dead=dead)
    for tensor in tensors:
        had, needed = elements(tensor.before, tensor.shape), elements(tensor.after, tensor.shape)
        alive = np.any([had[p] for p in had if p not in dead], axis=0)
        came = {process: np.zeros(tensor.shape, dtype=int) for process in had}
        for move in (m for m in found.moves if m.name == tensor.name):
            sent = elements({move.target: (move.part,)}, tensor.shape)[move.target]
            assert had[move.source][sent].all()
            assert dead.isdisjoint((move.source, move.target))
            assert (move.nbytes, np.prod(move.shape)) == (sent.sum() * tensor.itemsize, sent.sum())
            came[move.target] += sent
        for process in set(range(6)) - dead:
            lacks = needed[process] & ~had[process]
            assert (came[process] == (lacks & alive)).all()
            gone = np.zeros(tensor.shape, dtype=bool)
            for lost in (each for each in found.lost if each.name == tensor.name and process in each.targets):
                gone |= elements({process: (lost.part,)}, tensor.shape)[process]
            assert (gone == (lacks & ~alive)).all()


@given(changes())
@settings(max_examples=30)
def test_a_part_comes_from_the_receivers_node_where_somebody_there_has_it(change):
    tensors = kept_between(*change, PROCESS_OF)
    by_name = {tensor.name: tensor for tensor in tensors}
    for move in moves_of(tensors, node_of=node).moves:
        tensor = by_name[move.name]
        sent = elements({0: (move.part,)}, tensor.shape)[0]
        near = [p for p, had in elements(tensor.before, tensor.shape).items() if had[sent].all()]
        if any(node(process) == node(move.target) for process in near):
            assert node(move.source) == node(move.target)


@given(changes())
@settings(max_examples=30)
def test_an_unchanged_plan_moves_nothing(change):
    old, _, model = change
    found = moves_of(kept_between(old, old, model, PROCESS_OF))
    assert found.moves == found.lost == ()


def whole(*shape):
    return (tuple((range(length),) for length in shape),)


def kept(name, before, after, length=10):
    return Kept(
        name=name, shape=(length,), itemsize=1,
        before={p: whole(length) for p in before}, after={p: whole(length) for p in after},
    )  # fmt: skip


def test_holders_share_the_sending():
    """Alike tensors, one larger: the largest goes first, and whoever sends it sends less of the others."""
    tensors = [kept(f"t{i}", (0, 1, 2), (3,)) for i in range(6)] + [kept("large", (0, 1, 2), (3,), 30)]
    sent = [0, 0, 0]
    for move in moves_of(tensors).moves:
        sent[move.source] += move.nbytes
    assert sent == [30, 30, 30]


def test_a_part_without_a_live_holder_is_told_with_who_needs_it():
    found = moves_of([kept("a", (0,), (1, 2)), kept("b", (0, 1), (1, 2))], dead={0})
    (lost,) = found.lost
    assert (lost.name, lost.targets, lost.nbytes) == ("a", (1, 2), 10)
    assert [(m.name, m.source, m.target) for m in found.moves] == [("b", 1, 2)]


def test_runs_of_elements_move_too():
    """What ZeRO gives a rank of a matrix is no product of intervals: the end of a row, rows, a beginning."""
    first = ((range(1),), (range(3),))
    rest = (((range(1),), (range(3, 4),)), ((range(1, 5),), (range(4),)))
    tensor = Kept(
        name="w",
        shape=(5, 4),
        itemsize=8,
        before={0: (first,), 1: rest},
        after={2: whole(5, 4), 0: whole(5, 4)},
    )
    found = moves_of([tensor])
    assert found.nbytes == (20 + 17) * 8
    assert found.lost == ()
    assert {(m.source, m.target) for m in found.moves} == {(0, 2), (1, 2), (1, 0)}


def test_a_number_without_dims_is_a_part_too():
    tensor = Kept(name="step", shape=(), itemsize=4, before={0: ((),)}, after={0: ((),), 1: ((),)})
    (move,) = moves_of([tensor]).moves
    assert (move.source, move.target, move.nbytes, move.shape) == (0, 1, 4, ())


def chain(*stages):
    return Plan(
        model="tiny", global_batch=2, sequence=1,
        pipelines=(
            Pipeline(
                micro_batches=1, micro_batch=2,
                stages=tuple(
                    Stage(layers=layers, replicas=(Replica(devices=devices, share=2),))
                    for layers, devices in stages
                ),
            ),
        ),
    )  # fmt: skip


def test_devices_keep_their_process_where_a_plan_numbers_them_otherwise():
    """In the second plan b is the first node, so that ranks are others; still only block 1 moves."""
    old = chain(((0, 2), ("a:0",)), ((2, 3), ("b:0",)))
    new = chain(((0, 1), ("a:0",)), ((1, 3), ("b:0",)))
    turned = chain(((0, 1), ("b:0",)), ((1, 3), ("a:0",)))
    model = model_of(3, tied=False)
    moved = moves_of(kept_between(old, new, model, PROCESS_OF)).moves
    assert {m.name.split(".")[1] for m in moved} == {"1"}
    assert {(m.source, m.target) for m in moved} == {(PROCESS_OF["a:0"], PROCESS_OF["b:0"])}
    assert {m.name.split(".")[1] for m in moves_of(kept_between(old, turned, model, PROCESS_OF)).moves} == {
        "0",
        "2",
    }


def test_moves_do_not_depend_on_the_order_of_a_mapping():
    tensors = [kept(f"t{i}", (0, 1), (0, 1, 2, 3)) for i in range(3)]
    turned = [
        replace(t, before=dict(reversed(t.before.items())), after=dict(reversed(t.after.items())))
        for t in tensors
    ]
    assert moves_of(tensors) == moves_of(turned)
    assert len(moves_of(tensors).moves) == 6
