"""Plans with ZeRO: exact, a part of the states on each rank, refused without DeepSpeed."""

import sys
import time

import msgspec
import pytest
import torch
from torch import nn

from arachne_runtime.backends.environment import has_deepspeed, refuse_without_deepspeed
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError, WorkerFailedError
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.runnable import obstacles
from arachne_runtime.plan.zero import zero_group_of, zero_groups
from arachne_runtime.testing import run_ranks
from bench.cases import Case, gap, train_all_by_plan, train_plainly
from bench.exactness_tensor import TensorCase


def stage(layers, *replicas, **settings):
    found = tuple(Replica(devices=tuple(d.split()), share=share) for d, share in replicas)
    return Stage(layers=layers, replicas=found, **settings)


def plan_of(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B):
    rows = sum(p.micro_batches * p.micro_batch for p in pipelines)
    return Plan(model="tiny", global_batch=rows, sequence=4, schedule=schedule, pipelines=pipelines)


UNLIKE = plan_of(
    Pipeline(micro_batches=3, micro_batch=4, stages=(
        stage((0, 2), ("a:0", 3), ("a:1", 1), zero=1), stage((2, 5), ("a:2", 4), zero=1),
    )),
    Pipeline(micro_batches=2, micro_batch=1, stages=(stage((0, 5), ("b:0", 1)),)),
)  # fmt: skip
"""Stages whose blocks a second pipeline holds whole."""
PARALLEL = plan_of(
    Pipeline(micro_batches=2, micro_batch=3, stages=(stage((0, 5), ("a:0 a:1", 2), ("b:0 b:1", 1), zero=1),)),
)  # fmt: skip
WIDE = plan_of(
    Pipeline(micro_batches=3, micro_batch=6, stages=(
        stage((0, 5), ("a:0", 3), ("a:1", 2), ("a:2", 1), zero=1),
    )),
)  # fmt: skip


def with_zero(plan, zero, **settings):
    stages = (
        tuple(msgspec.structs.replace(s, zero=zero, **settings) for s in p.stages) for p in plan.pipelines
    )
    pipelines = (msgspec.structs.replace(p, stages=s) for p, s in zip(plan.pipelines, stages, strict=True))
    return msgspec.structs.replace(plan, pipelines=tuple(pipelines))


def check(cases, *, single=1e-5, double=1e-9):
    num_ranks = len(cases[0].plan.devices)
    for case, outcomes in zip(
        cases, zip(*run_ranks(num_ranks, train_all_by_plan, cases), strict=True), strict=True
    ):
        wanted = train_plainly(case)
        bound = double if case.dtype is torch.float64 else single
        for outcome in outcomes:
            found = gap(outcome, wanted)
            assert max(found.loss, found.norm, found.gradient) < bound, case
            assert found.parameter < bound or (case.adam and case.dtype is torch.float32), case


def test_split_states_beside_a_pipeline_that_holds_the_same_blocks_whole():
    check([
        TensorCase(UNLIKE, adam=True, clip_norm=0.1, scheduled=True),
        TensorCase(UNLIKE, adam=True, by_items=True, blocking=True, in_pieces=True, tied=False),
        Case(UNLIKE, clip_norm=0.1, rows=(14, 5, 1)),
        Case(UNLIKE, dtype=torch.float32),
    ])  # fmt: skip


def test_split_states_of_tensor_parallel_replicas():
    check([TensorCase(PARALLEL, adam=True, clip_norm=0.1), TensorCase(PARALLEL, fused=False)])


def test_split_states_of_unequal_shares():
    check([TensorCase(WIDE, adam=True, rows=(18, 7, 2)), Case(WIDE, dtype=torch.float32, clip_norm=0.1)])


def test_the_comparison_can_fail():
    case = TensorCase(WIDE, adam=True)
    outcome, *_ = run_ranks(3, train_all_by_plan, [case])[0]
    assert gap(outcome, train_plainly(TensorCase(WIDE, adam=True, clip_norm=0.01))).parameter > 1e-6


def bytes_of_states(plan):
    parts = ModelParts.of(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(plan.num_blocks)]))
    recipe = Recipe(
        optimizer=lambda p: torch.optim.AdamW(p),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
    )
    engine = Engine(plan, parts, recipe)
    engine.step((torch.randn(plan.global_batch, 64), torch.randn(plan.global_batch, 64)))
    states = engine.optimizer.state.values()
    found = sum(v.nbytes for state in states for v in state.values() if v.numel() > 1)
    engine.close()
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_each_rank_keeps_its_part_of_the_states(zero):
    whole = 5 * (64 * 64 + 64) * 4 * 2  # two moments of float32
    found = run_ranks(3, bytes_of_states, with_zero(WIDE, zero))
    assert [round(part / whole, 2) for part in found] == [0.33 if zero else 1.0] * 3


def test_ranks_with_equal_parts_form_a_group():
    assert zero_groups(UNLIKE) == ((0, 1),)
    assert zero_groups(PARALLEL) == ((0, 2), (1, 3))
    assert zero_group_of(UNLIKE, 1) == (0, 1)
    assert zero_group_of(UNLIKE, 2) == zero_group_of(with_zero(WIDE, 0), 0) == ()


INTERLEAVED = plan_of(
    Pipeline(micro_batches=2, micro_batch=2, stages=tuple(
        stage((s, s + 1), ("a:0", 1), ("a:1", 1), zero=s) for s in range(2)
    )),
    schedule=ScheduleKind.INTERLEAVED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (INTERLEAVED, "zero is 1, but another stage of its devices has another"),
        (with_zero(PARALLEL, 1, expert_parallel=2), "zero is 1 with experts shared out"),
        (with_zero(UNLIKE, 2), "zero is 2, which needs a plan of one pipeline with one stage: set it to 1"),
        (with_zero(PARALLEL, 3), "zero is 3, which needs TP 1"),
        (with_zero(WIDE, 3, recompute=True), "zero is 3 with recompute"),
        (
            msgspec.structs.replace(with_zero(WIDE, 2), schedule=ScheduleKind.GPIPE),
            "zero is 2, which needs schedule 1f1b, not gpipe",
        ),
        (
            plan_of(Pipeline(micro_batches=1, micro_batch=2, stages=(
                stage((0, 5), ("a:0 a:1", 1), ("a:2", 1), zero=1),
            ))),
            "zero is 1 over replicas of TP 1 and 2, whose ranks hold unlike parts",
        ),
    ],
)  # fmt: skip
def test_what_deepspeed_cannot_split_is_refused(plan, told):
    assert any(told in obstacle for obstacle in obstacles(plan))


def test_what_it_can_split_is_not():
    assert not any(obstacles(plan) for plan in (UNLIKE, PARALLEL, WIDE))
    alone = plan_of(Pipeline(micro_batches=1, micro_batch=1, stages=(stage((0, 2), ("a:0", 1), zero=3),)))
    assert not obstacles(alone)  # nobody to split with


def without_deepspeed():
    sys.modules["deepspeed"] = None
    try:
        train_all_by_plan([TensorCase(WIDE)])
    finally:
        del sys.modules["deepspeed"]


def test_without_deepspeed_the_engine_says_how_to_install_it():
    told = (
        r"UnsupportedEnvironmentError: the plan splits optimizer states by ZeRO \(\$\.pipelines\[0\]\.stages"
    )
    with pytest.raises(WorkerFailedError, match=told) as caught:
        run_ranks(3, without_deepspeed)
    assert "pip install 'arachne-hetero[deepspeed]'" in str(caught.value)


def test_without_deepspeed_no_rank_is_started(mocker, tmp_path):
    from arachne_runtime.plan.files import write
    from launch.torchrun import run_plan

    path = tmp_path / "plan.json"
    write(UNLIKE, path)
    mocker.patch.dict(sys.modules, {"deepspeed": None})
    assert not has_deepspeed()
    with pytest.raises(UnsupportedEnvironmentError, match=r"pip install 'arachne-hetero\[deepspeed\]'"):
        run_plan(path, ["train.py"])
    refuse_without_deepspeed(with_zero(UNLIKE, 0))


def fails_on_the_last_rank(plan):
    """What each rank is told where the optimizer of the last one cannot be made, and the seconds to it."""
    last = torch.distributed.get_world_size() - 1

    def make(parameters):
        if torch.distributed.get_rank() == last:
            raise MemoryError("no room for the optimizer")
        return torch.optim.AdamW(parameters)

    recipe = Recipe(optimizer=make, loss=lambda output, batch: output.mean())
    start = time.monotonic()
    with pytest.raises((MemoryError, UsageError)) as caught:
        Engine(plan, ModelParts.of(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))), recipe)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_optimizer_that_one_rank_cannot_make_is_told_on_all(zero):
    """Within DeepSpeed the others would wait for it up to the time limit of the group, here 60 s."""
    *others, last = run_ranks(3, fails_on_the_last_rank, with_zero(WIDE, zero))
    assert last[0] == "no room for the optimizer"
    for told, seconds in others:
        assert told.startswith("1 of the 3 ranks that split their optimizer states could not make")
        assert seconds < 20


class Shaped(torch.optim.Optimizer):
    """Divides the gradient of a parameter by its norm, as LARS and LAMB do."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


def with_optimizer(kind):
    recipe = Recipe(optimizer=kind, loss=lambda output, batch: output.mean())
    Engine(WIDE, ModelParts.of(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])), recipe)


@pytest.mark.parametrize("kind", [Shaped, torch.optim.Adafactor])
def test_an_optimizer_that_looks_at_shapes_is_refused(kind):
    with pytest.raises(
        WorkerFailedError, match=f"UnsupportedPlanError: {kind.__name__} steps a parameter by its shape"
    ):
        run_ranks(3, with_optimizer, kind)
