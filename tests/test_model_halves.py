"""Layers cut in attention and MLP blocks: a plan of half layers trains like one process."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from arachne_runtime.errors import ModelError
from arachne_runtime.model import ModelParts, pipelined
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks
from bench.cases import gap, train_by_plan, train_plainly
from bench.exactness_halves import HalfCase, HalfGPT

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Two linear halves with an activation that both may use."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()

    def one(self, x):
        return x + self.act(self.first(x))

    def two(self, x):
        return x + self.act(self.second(x))

    def forward(self, x):
        return self.two(self.one(x))


def two_as_function(layer, x):
    return layer.two(x)


def model_of(halves, layer=Layer):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(layer(), layer())

        def forward(self, x):
            return self.layers(x)

    return lambda: pipelined(blocks="layers", halves=halves)(Stack)()


HALVES = {"one": "first", two_as_function: ("second",)}


def test_a_half_holds_its_submodules_and_runs_its_method():
    parts = ModelParts.of(model_of(HALVES))
    assert parts.num_blocks == 4
    names = [[info.name for info in parts.parameters_of(block)] for block in range(4)]
    assert names[1] == ["blocks.1.second.weight", "blocks.1.second.bias"]
    assert parts.kinds == ("one", "two_as_function", "one", "two_as_function")
    x = torch.randn(3, 2)
    parts.verify(x)
    stage = parts.stage(range(1, 3), device=CPU, seed=0)
    assert {name for name, _ in stage.named_parameters()} == {*names[1], *names[2]}
    whole = parts.whole(seed=0)
    expected = whole.layers[1].one(whole.layers[0].two(x))
    assert torch.equal(stage((x,), {})[0], expected)


class Direct(Layer):
    """Has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("halves", "layer", "told"),
    [
        ({"one": "first"}, Layer, "'second' has parameters and is in no half"),
        ({"one": ("first", "second"), "two": "second"}, Layer, "'second' is in two halves"),
        ({"one": "first", "three": "second"}, Layer, "no method 'three'"),
        ({"one": "first", "two": "third"}, Layer, "no submodule 'third'; it has: first, second, act"),
        ({"one": "first", "two": "second"}, Direct, "scale belong to the layer itself"),
    ],
)
def test_halves_that_do_not_share_out_a_layer_are_refused(halves, layer, told):
    with pytest.raises(ModelError, match=told):
        ModelParts.of(model_of(halves, layer))


def test_the_kinds_of_a_decoder_are_those_of_its_halves():
    parts = ModelParts.of(lambda: HalfGPT(2, False))
    assert parts.kinds == ("embedding", "attention", "mlp", "attention", "mlp", "head")


def half_case(schedule, *cut, **settings):
    stages = tuple(
        Stage(layers=edges, recompute=i == 1, replicas=(Replica(devices=(f"n:{i % 3}",), share=2),))
        for i, edges in enumerate(pairwise((0, *cut)))
    )
    pipeline = Pipeline(micro_batches=3, micro_batch=2, stages=stages)
    plan = Plan(model="tiny", global_batch=6, sequence=4, schedule=schedule, pipelines=(pipeline,))
    return HalfCase(plan, **settings)


@pytest.mark.parametrize(
    ("schedule", "cut"),
    [
        (ScheduleKind.ONE_F_ONE_B, (2, 3, 6)),
        (ScheduleKind.ZERO_BUBBLE, (2, 5, 6)),
        (ScheduleKind.INTERLEAVED, (1, 2, 3, 4, 5, 6)),
    ],
)
def test_a_plan_of_half_layers_trains_like_one_process(schedule, cut):
    case = half_case(schedule, *cut, clip_norm=0.1, adam=True)
    wanted = train_plainly(case)
    held = set()
    for outcome in run_ranks(3, train_by_plan, case):
        held |= outcome.parameters.keys()
        assert max(vars(gap(outcome, wanted)).values()) < 1e-9
    assert held == set(wanted.parameters)
