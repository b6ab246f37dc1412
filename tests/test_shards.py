"""Which rank holds and sums which part of a parameter: each element once, whatever the cuts."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.shards import (
    Atom,
    Axis,
    Holder,
    ParameterForm,
    Position,
    Split,
    atoms,
    boxes,
    held,
    holders,
    local_shape,
)
from tests.strategies import plans


def qkv(heads, groups, rows=2, **kwargs):
    """A fused q, k, v of some heads and fewer groups of k and v."""
    lengths = tuple(n * rows for n in (heads, groups, groups))
    split = Split(Axis.TENSOR, 0, lengths, (heads, groups, groups), repeats=True)
    return ParameterForm("qkv", (sum(lengths), 3), 4, splits=(split,), **kwargs)


def rows(count, units=None, dim=0, **kwargs):
    shape = (count, 2) if dim == 0 else (2, count)
    split = Split(Axis.TENSOR, dim, (count,), (units or count,))
    return ParameterForm("rows", shape, 4, splits=(split,), **kwargs)


FORMS = st.sampled_from(
    (
        qkv(12, 12), qkv(12, 6), qkv(12, 2), qkv(12, 1), rows(12), rows(13), rows(24, 12), rows(14, dim=1),
        ParameterForm("norm", (5,), 4), ParameterForm("scalar", (), 4),
        ParameterForm("q norm", (5,), 4, partial=True),
    )
)  # fmt: skip


def indices(intervals):
    return [i for run in intervals for i in run]


def part_of(array, intervals):
    return array[np.ix_(*(indices(runs) for runs in intervals))] if intervals else array


def gradients(form, held_by, random):
    """By rank a local gradient, such that each unit gives some whole array; and the sum of these."""
    total = np.zeros(form.shape)
    found = {}
    for unit in dict.fromkeys(h.unit for h in held_by):
        mine = [h for h in held_by if h.unit == unit]
        whole = random.standard_normal(form.shape)
        total += whole
        copies = np.zeros(form.shape)
        for h in mine:
            copies[np.ix_(*map(indices, held(form, h.position)))] += 1
        parts = form.partial or any(s.repeats for s in form.splits)
        rest = whole.copy()
        for h in mine:
            at = np.ix_(*map(indices, held(form, h.position)))
            if not parts:
                found[h.rank] = whole[at]
                continue
            copies[at] -= 1
            piece = random.standard_normal(form.shape)
            local = np.where(copies[at] > 0, piece[at], rest[at])
            rest[at] -= local
            found[h.rank] = local
    return found, total


def summed(form, held_by, local):
    """By rank its local tensor after every atom was summed over its contributors."""
    where = {h.rank: held(form, h.position) for h in held_by}
    result = {rank: np.full_like(array, np.nan) for rank, array in local.items()}
    for atom in atoms(form, held_by):
        dense = {}
        for rank in atom.members:
            dense[rank] = np.zeros(atom.shape)
            for inner, outer in boxes(atom.intervals, where[rank]):
                dense[rank][inner] = local[rank][outer]
        total = sum(dense[rank] for rank in atom.contributors)
        for rank in atom.members:
            for inner, outer in boxes(atom.intervals, where[rank]):
                assert np.isnan(result[rank][outer]).all(), "no element is in two atoms"
                result[rank][outer] = total[inner]
    return result, where


def check_sums(form, held_by, seed):
    local, total = gradients(form, held_by, np.random.default_rng(seed))
    result, where = summed(form, held_by, local)
    for rank, array in result.items():
        np.testing.assert_allclose(array, part_of(total, where[rank]), atol=1e-12)
    norm = sum(
        float(np.square(part_of(total, atom.intervals)).sum())
        for atom in atoms(form, held_by)
        for rank in atom.members[:1]
    )
    np.testing.assert_allclose(norm, np.square(total).sum())


@settings(max_examples=200, deadline=None)
@given(form=FORMS, plan=plans(max_devices=8, num_blocks=3), block=st.integers(0, 2), seed=st.integers(0, 99))
def test_any_holders_get_the_sum_and_count_each_element_once(form, plan, block, seed):
    held_by = holders(plan, form, [block])
    degrees = {h.position.tensor[1] for h in held_by}
    assume(not any(split.refusal(degree) for split in form.splits for degree in degrees))
    check_sums(form, held_by, seed)


def tiled(experts, ep, etp, devices, first):
    """Holders of one stage whose devices are tiles of experts."""
    return [
        Holder(
            first + i,
            (first, 0, i // (ep * etp)),
            Position(expert=(i // etp % ep, ep), expert_tensor=(i % etp, etp)),
        )
        for i in range(devices)
    ]


@pytest.mark.parametrize(("a", "b"), list(product([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)], repeat=2)))
def test_experts_tiled_unlike_in_two_stages(a, b):
    splits = (Split(Axis.EXPERT, 0, (4,), (4,)), Split(Axis.EXPERT_TENSOR, 1, (6, 6), (6, 6)))
    up = ParameterForm("up", (4, 12, 3), 4, splits=splits)
    bias = ParameterForm("bias", (4, 3), 4, splits=splits[:1])
    held_by = [*tiled(4, *a, devices=4, first=0), *tiled(4, *b, devices=4, first=4)]
    for form in (up, bias):
        check_sums(form, held_by, seed=1)


def replicas(*degrees):
    ranks = iter(range(99))
    return [
        Holder(next(ranks), (0, 0, unit), Position(tensor=(index, degree)))
        for unit, degree in enumerate(degrees)
        for index in range(degree)
    ]


def test_half_of_a_shard_of_a_fused_weight_is_not_a_shard_of_it():
    form = qkv(4, 4, rows=1)
    assert held(form, Position(tensor=(0, 2))) == ((range(2), range(4, 6), range(8, 10)), (range(3),))
    assert held(form, Position(tensor=(1, 4))) == ((range(1, 2), range(5, 6), range(9, 10)), (range(3),))
    first = atoms(form, replicas(2, 4))[0]
    runs = (range(1), range(4, 5), range(8, 9))
    assert first == Atom((runs, (range(3),)), (0, 2), (0, 2))
    assert [atom.members for atom in atoms(form, replicas(2, 4))] == [(0, 2), (0, 3), (1, 4), (1, 5)]


def test_copies_of_a_norm_get_the_sum_of_one_rank_of_each_replica():
    norm = ParameterForm("norm", (5,), 4)
    assert atoms(norm, replicas(2, 1)) == (Atom(((range(5),),), (0, 1, 2), (0, 2)),)
    partial = ParameterForm("q norm", (5,), 4, partial=True)
    assert atoms(partial, replicas(2, 1)) == (Atom(((range(5),),), (0, 1, 2), (0, 1, 2)),)


def test_groups_of_k_and_v_fewer_than_the_degree_are_copies_that_all_contribute():
    form = qkv(4, 2, rows=1)
    assert local_shape(form, Position(tensor=(3, 4))) == (3, 3)
    shared = [atom for atom in atoms(form, replicas(4)) if len(atom.members) > 1]
    assert [(a.members, a.contributors) for a in shared] == [((0, 1), (0, 1)), ((2, 3), (2, 3))]
    assert shared[0].intervals[0] == (range(4, 5), range(6, 7))


def test_a_vocabulary_that_does_not_divide_is_cut_by_rows():
    form = rows(13)
    assert [local_shape(form, Position(tensor=(i, 4)))[0] for i in range(4)] == [4, 3, 3, 3]


@pytest.mark.parametrize(
    ("form", "degree", "told"),
    [
        (rows(12, units=6), 4, "6 units of 2 rows"),
        (rows(2), 4, "2 rows, which 4 ranks cannot share"),
        (rows(6, units=2), 4, "a degree out of 1, 2"),
        (qkv(4, 3), 2, "3 units of 2 rows"),
    ],
)
def test_a_cut_through_a_head_is_refused_with_degrees_that_fit(form, degree, told):
    assert told in form.splits[0].refusal(degree)


def test_a_tie_is_held_by_the_stages_of_all_its_blocks():
    def stage(layers, *groups):
        return Stage(layers=layers, replicas=tuple(Replica(devices=d, share=1) for d in groups))

    stages = (stage((0, 1), ("a:0", "a:1")), stage((1, 2), ("b:0",)), stage((2, 3), ("c:0",)))
    pipeline = Pipeline(micro_batches=1, micro_batch=1, stages=stages)
    plan = Plan(model="m", global_batch=1, sequence=1, pipelines=(pipeline,))
    table = rows(6, tie="t")
    assert [a.members for a in atoms(table, holders(plan, table, (0, 2)))] == [(0, 3), (1, 3)]
