"""Shapes: primitive and distinct, and expanded to templates that the devices hold and the batch fills."""

import numpy as np
import pytest

from planner.search.batch import Templates
from planner.search.shapes import Shapes, expanded, shapes_of
from planner.search.supply import use_of
from tests.test_search_templates import MIXED, completion_of, request_of


def test_shapes_of_templates_are_primitive():
    templates = Templates.of(
        [([(0, 1, 4, 1), (1, 2, 2, 1)], 3, 8), ([(0, 1, 2, 1), (1, 2, 1, 1)], 6, 4), ([(1, 1, 3, 1)], 1, 3)]
    )
    shapes = shapes_of(templates)
    assert shapes.width.tolist() == [[2, 1], [2, 1], [1, 0]]
    assert shapes.depth.tolist() == [2, 2, 1]
    assert len(shapes.distinct()) == 2


def test_shapes_of_unlike_depths_are_joined():
    short, long = Shapes.of([[(0, 1, 1)]]), Shapes.of([[(1, 2, 1), (0, 1, 2), (0, 1, 2)]])
    joined = Shapes.joined([short, long, short])
    assert joined.depth.tolist() == [1, 3, 1]
    assert joined.tp[0].tolist() == [1, 1, 1]
    assert len(joined.distinct()) == 2


def test_a_shape_takes_as_many_copies_as_the_nodes_hold():
    completion = completion_of(request_of(*MIXED, global_batch=64))
    templates, origin = expanded(completion, Shapes.of([[(0, 4, 1), (1, 1, 1)], [(0, 1, 1)], [(0, 1, 9)]]))
    assert set(origin.tolist()) == {0, 1}  # nine groups of one are more than eight devices
    first = templates.take(origin == 0)
    assert first.copies.max() == 2
    assert set(first.micro_batch.tolist()) == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    limits = completion.supply.limits
    use = use_of(limits, templates.pool, templates.tp, templates.width) * templates.copies[:, None]
    assert (use <= [limit.places for limit in limits]).all()
    assert (templates.copies * templates.micro_batch <= 64).all()


def test_micro_batches_suit_the_widest_stage():
    completion = completion_of(request_of(*MIXED, global_batch=96))
    templates, _ = expanded(completion, Shapes.of([[(0, 1, 3), (1, 1, 2)]]))
    assert (templates.micro_batch % 3 == 0).all()
    assert templates.copies.max() == 2


def test_fewer_copies_that_need_as_many_micro_batches_are_there_too():
    completion = completion_of(request_of(("a", "A100-40", 4, 2), global_batch=10))
    templates, _ = expanded(completion, Shapes.of([[(0, 1, 1)]]))
    assert sorted(templates.copies[templates.micro_batch == 1].tolist()) == [5, 8]


def test_experts_are_tiled_over_merged_copies():
    completion = completion_of(request_of(("a", "A100-80", 4, 3), model="mixtral-8x7b", global_batch=48))
    templates, origin = expanded(completion, Shapes.of([[(0, 1, 1), (0, 1, 1)]]))
    assert (templates.pool.shape[1], set(origin.tolist())) == (2, {0})
    assert {1, 3, 6} <= set(templates.width[:, 0].tolist())
    assert ((templates.tp * templates.width) % templates.tile == 0).all()
    assert templates.tile.max() == 6
    assert len(templates.distinct()) == len(templates)


def test_money_asks_for_fewer_copies():
    from planner.request import Objective

    request = request_of(*MIXED, global_batch=64, objective=Objective.COST)
    templates, _ = expanded(completion_of(request), Shapes.of([[(0, 1, 1)]]))
    assert {1, 2, 4, 8} <= set(templates.copies.tolist())


@pytest.mark.parametrize("shapes", [Shapes.of([]), Shapes.of([[(0, 1, 1)] * 99])])
def test_nothing_comes_of_nothing(shapes):
    templates, origin = expanded(completion_of(request_of(*MIXED)), shapes)
    assert len(templates) == len(origin) == 0
    assert np.asarray(templates.copies).dtype == np.int64
