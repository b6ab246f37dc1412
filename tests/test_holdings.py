"""The state of a job by global names: the same tensors under any plan, and a new engine can take them."""

import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import UnsupportedPlanError, WorkerFailedError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.shards import boxes
from arachne_runtime.state.holdings import VALUE, States, holdings, make_states, scalars, settle
from arachne_runtime.state.parts import crossing, numel_of, run_of_elements, shape_of, whole
from arachne_runtime.surroundings import lone_plan
from arachne_runtime.testing import run_ranks
from bench import exactness_plans
from bench.cases import Case
from bench.exactness_experts import ExpertsCase, random_tiled_plan
from bench.exactness_plans import random_plan
from bench.exactness_tensor import BLOCKS, TensorCase, random_tensor_plan
from bench.exactness_zero import _with_zero


def test_runs_of_elements_are_boxes_in_order():
    source = random.Random(0)
    for _ in range(300):
        shape = tuple(source.randint(1, 4) for _ in range(source.randint(0, 3)))
        tensor = torch.arange(numel_of(whole(shape))).view(shape)
        start, stop = sorted(source.randint(0, tensor.numel()) for _ in range(2))
        found, at = [], start
        for elements, part in run_of_elements(range(start, stop), whole(shape)):
            assert elements.start == at
            at = elements.stop
            found += [v for _, place in boxes(part, whole(shape)) for v in tensor[place].flatten().tolist()]
        assert found == list(range(start, stop))


def test_a_run_of_a_shard_is_told_by_the_indices_of_the_whole():
    part = ((range(1, 2), range(4, 6)), (range(2, 4),))  # rows 1, 4 and 5, columns 2 and 3
    assert list(run_of_elements(range(1, 6), part)) == [
        (range(1, 2), ((range(1, 2),), (range(3, 4),))),
        (range(2, 6), ((range(4, 6),), (range(2, 4),))),
    ]


def test_what_lies_in_both_parts():
    a, b = ((range(2), range(4, 8)), (range(3),)), ((range(1, 6),), (range(2, 9),))
    assert crossing(a, b) == ((range(1, 2), range(4, 6)), (range(2, 3),))
    assert crossing(a, ((range(2, 4),), (range(3),))) is None


def optimizer(case: Case, parameters) -> torch.optim.Optimizer:
    if case.adam:
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine_of(case: Case) -> Engine:
    recipe = Recipe(
        optimizer=partial(optimizer, case),
        loss=case.loss,
        inputs=lambda batch: (batch["tokens"],),
        dtype=case.dtype,
        seed=5,
    )
    return Engine(case.plan, ModelParts.of(case.model), recipe)


def held_after(case: Case, steps: int) -> tuple[list, dict]:
    engine = engine_of(case)
    for step in range(steps):
        engine.step(case.batch(step))
    found = [(h.name, h.key, h.shape, h.part, h.tensor.clone()) for h in holdings(engine)]
    numbers = scalars(engine)
    engine.close()
    return found, numbers


def joined(found: list[tuple[list, dict]]) -> tuple[dict, dict]:
    """Whole tensors from the parts of all ranks, which must be equal where they overlap."""
    tensors: dict = {}
    seen: dict = {}
    numbers: dict = {}
    for held, counted in found:
        for name, each in counted.items():
            assert numbers.setdefault(name, each) == each
        for name, key, shape, part, tensor in held:
            whole_, known = (
                tensors.setdefault((name, key), tensor.new_zeros(shape)),
                seen.setdefault((name, key), torch.zeros(shape, dtype=torch.bool)),
            )
            assert tuple(tensor.shape) == shape_of(part)
            for inner, outer in boxes(part, whole(shape)):
                assert torch.equal(whole_[outer][known[outer]], tensor[inner][known[outer]])
                whole_[outer] = tensor[inner]
                known[outer] = True
    assert all(known.all() for known in seen.values())
    return tensors, numbers


def taken_over(case: Case, tensors: dict, numbers: dict) -> tuple[list, dict]:
    """A new engine with the state of another job, and what it then holds."""
    engine = engine_of(case)
    keys: dict = {}
    for name, key in tensors:
        if key != VALUE:
            keys.setdefault(name, {})[key] = tensors[name, key].dtype
    states = {
        name: States(dtypes=keys.get(name, {}), scalars=numbers.get(name, {})) for name in {*keys, *numbers}
    }
    make_states(engine, states)
    for held in holdings(engine):
        for inner, outer in boxes(held.part, whole(held.shape)):
            held.tensor[inner].copy_(tensors[held.name, held.key][outer])
    settle(engine)
    found = [(h.name, h.key, h.shape, h.part, h.tensor.clone()) for h in holdings(engine)]
    told = scalars(engine)
    reports = [engine.step(case.batch(step)).loss for step in (1, 2)]
    engine.close()
    return [(found, told), reports]


def same(a: tuple[dict, dict], b: tuple[dict, dict]) -> bool:
    (tensors, numbers), (others, other_numbers) = a, b
    return (
        tensors.keys() == others.keys()
        and all(torch.equal(tensors[key], others[key]) for key in tensors)
        and numbers == other_numbers
    )


def check_pair(case: Case, other: Case) -> None:
    state = joined(run_ranks(len(case.plan.devices), held_after, case, 2))
    keys = {"exp_avg", "exp_avg_sq"} if case.adam else {"momentum_buffer"}
    assert {key for _, key in state[0]} == {VALUE} | keys
    assert case.adam == bool(state[1])
    there = run_ranks(len(other.plan.devices), taken_over, other, *state)
    here = run_ranks(len(case.plan.devices), taken_over, case, *state)
    assert same(joined([found for found, _ in there]), state)
    assert there[0][1] == pytest.approx(here[0][1], rel=1e-9)


def drawn(source: random.Random, kind: str, adam: bool) -> Case:
    while True:
        with suppress(ValueError):  # six devices in a row, and five blocks
            return _drawn(source, kind, adam)


def _drawn(source: random.Random, kind: str, adam: bool) -> Case:
    settings = {"adam": adam, "tied": True, "dtype": torch.float64}
    if kind == "experts":
        return ExpertsCase(plan=random_tiled_plan(source), **settings)
    if kind == "tensor":
        return TensorCase(plan=random_tensor_plan(source), **settings)
    case = TensorCase(plan=random_plan(source, source.choice(list(ScheduleKind))), **settings)
    return _with_zero(source, case) if kind == "zero" else case


@pytest.fixture(autouse=True)
def _models_of_one_length(monkeypatch):
    monkeypatch.setattr(exactness_plans, "BLOCKS", BLOCKS)


@pytest.mark.parametrize(
    ("first", "second", "adam"),
    [
        ("plain", "tensor", True),
        ("tensor", "plain", False),
        ("experts", "experts", True),
        ("zero", "tensor", True),
        ("plain", "zero", True),
        ("zero", "zero", False),
    ],
)
def test_the_state_of_one_plan_is_that_of_another(first, second, adam):
    source = random.Random(f"{first} {second} {adam}")
    one, other = (drawn(source, kind, adam) for kind in (first, second))
    rows = (min(one.plan.global_batch, other.plan.global_batch),) * 3
    check_pair(replace(one, rows=rows), replace(other, rows=rows))


def holdings_of_zero_2() -> None:
    replicas = tuple(Replica(devices=(f"a:{rank}",), share=1) for rank in range(2))
    one = Pipeline(
        micro_batches=1, micro_batch=2, stages=(Stage(layers=(0, BLOCKS), zero=2, replicas=replicas),)
    )
    plan = Plan(model="tiny", global_batch=2, sequence=4, pipelines=(one,))
    holdings(engine_of(TensorCase(plan=plan, adam=True, dtype=torch.float32)))


def test_what_deepspeed_packs_is_refused_with_a_way_out():
    with pytest.raises(
        WorkerFailedError, match=r"ZeRO-2 can be neither saved nor moved.* set zero to 1 or 0"
    ):
        run_ranks(2, holdings_of_zero_2)


def lone_engine(make, model=None) -> Engine:
    recipe = Recipe(optimizer=make, loss=lambda output, batch: output.square().mean())
    plan = lone_plan(2)
    return Engine(
        plan, ModelParts.of(model or (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))), recipe
    )


def test_a_state_that_is_not_of_elements_is_refused():
    engine = lone_engine(lambda p: torch.optim.Adafactor(p, lr=1e-2))
    engine.step(torch.ones(2, 4))
    with pytest.raises(UnsupportedPlanError, match=r"Adafactor keeps row_var of blocks.0.weight as a tensor"):
        holdings(engine)


def test_persistent_buffers_are_held_and_others_are_not():
    def model():
        norm = nn.BatchNorm1d(4)
        norm.register_buffer("table", torch.ones(3), persistent=False)
        return nn.Sequential(norm, nn.Linear(4, 2))

    found = {h.name for h in holdings(lone_engine(torch.optim.SGD, model)) if h.is_buffer}
    assert found == {f"blocks.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


class Stateful(nn.Linear):
    def get_extra_state(self):
        return 5


def test_a_module_with_a_state_of_its_own_form_is_refused():
    with pytest.raises(UnsupportedPlanError, match=r"blocks.1._extra_state: a module keeps a state"):
        holdings(lone_engine(torch.optim.SGD, lambda: nn.Sequential(nn.Linear(4, 4), Stateful(4, 2))))
