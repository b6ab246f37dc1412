"""Plans that share out experts train like one process: unequal shares, unlike tilings, guests."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from arachne_runtime import extra_losses
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.testing import run_ranks
from bench.cases import Gap
from bench.exactness_experts import MIXTURE, random_experts_case
from bench.exactness_frame import compare, largest
from examples.mixtral import Config, Mixtral, next_byte_loss

CONFIG = Config(vocabulary=11, sequence=5, width=12, heads=6, kv_heads=1, ffn=6, experts=5, layers=3)
SEED, STEPS = 5, 3


def stage(layers, *replicas, ep=1, etp=1, recompute=False):
    found = tuple(
        Replica(devices=(devices,) if isinstance(devices, str) else devices, share=share)
        for devices, share in replicas
    )
    return Stage(layers=layers, replicas=found, recompute=recompute, expert_parallel=ep, expert_tensor=etp)


def plan_of(*pipelines, schedule=ScheduleKind.ONE_F_ONE_B):
    rows = sum(p.micro_batches * p.micro_batch for p in pipelines)
    return Plan(model="tiny", global_batch=rows, sequence=5, schedule=schedule, pipelines=pipelines)


@dataclass(frozen=True)
class Case:
    plan: Plan
    compiled: bool | str = False
    adam: bool = False
    clip_norm: float | None = None
    rows: tuple[int, ...] = ()
    blocking: bool = False

    @property
    def rows_by_step(self):
        full = self.plan.global_batch
        return self.rows or (full, max(1, full - full // 3), full)

    def recipe(self):
        return Recipe(
            optimizer=self.optimizer,
            loss=next_byte_loss,
            clip_norm=self.clip_norm,
            dtype=torch.float64,
            seed=SEED,
            compile=self.compiled,
        )

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-3) if self.adam else torch.optim.SGD(parameters, lr=0.5)

    def batch(self, step):
        random = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (self.rows_by_step[step], 6), generator=random)
        return tokens[:, :-1], tokens[:, 1:]


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict = field(default_factory=dict)
    held: dict = field(default_factory=dict)
    """Of parameters of which the rank has a part: rows of each dim."""


def model():
    return Mixtral(CONFIG)


def by_plan(case):
    engine = Engine(case.plan, ModelParts.of(model), case.recipe(), blocking=case.blocking)
    found = Outcome()
    for step in range(STEPS):
        report = engine.step(case.batch(step))
        found.losses.append(report.loss)
        found.norms.append(report.grad_norm)
    found.parameters = {name: p.detach().clone() for name, p in engine.named_parameters()}
    found.held = engine.held_parts()
    engine.close()
    return found


def all_by_plan(cases):
    return [by_plan(case) for case in cases]


def plainly(case):
    whole = ModelParts.of(model).whole(seed=SEED, dtype=torch.float64)
    optimizer = case.optimizer(whole.parameters())
    found = Outcome()
    for step in range(STEPS):
        batch = case.batch(step)
        optimizer.zero_grad()
        with extra_losses() as added:
            loss = next_byte_loss(whole(batch[0]), batch)
        loss = loss + sum(added)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), case.clip_norm or float("inf"))
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        optimizer.step()
    for name, parameter in whole.named_parameters():
        place, rest = name.split(".", 1)
        index, rest = rest.split(".", 1) if place == "layers" else ("-1", rest)
        block = {"embed": 0, "norm": 4, "head": 4}.get(place, int(index) + 1)
        found.parameters[f"blocks.{block}.{'' if place in ('embed', 'layers') else place + '.'}{rest}"] = (
            parameter.detach()
        )
    return found


def part(whole, held):
    for dim, runs in enumerate(held):
        whole = whole.index_select(dim, torch.tensor([i for run in runs for i in run]))
    return whole


def check(cases):
    wanted = [plainly(case) for case in cases]
    found = run_ranks(len(cases[0].plan.devices), all_by_plan, cases)
    for outcomes, expected in zip(zip(*found, strict=True), wanted, strict=True):
        assert {n for o in outcomes for n in o.parameters} == set(expected.parameters)
        for outcome in outcomes:
            assert outcome.losses == pytest.approx(expected.losses, abs=1e-9)
            assert outcome.norms == pytest.approx(expected.norms, abs=1e-9)
            for name, value in outcome.parameters.items():
                wanted_part = part(expected.parameters[name], outcome.held.get(name, ()))
                assert (value - wanted_part).abs().max() < 1e-9, name


WIDE = plan_of(
    Pipeline(micro_batches=3, micro_batch=4, stages=(stage((0, 5), ("a:0", 3), ("b:0", 1), ep=2),))
)


def test_two_unequal_replicas_with_half_of_the_experts_each():
    """EP across nodes; a batch of one row leaves a replica without any."""
    check([Case(WIDE), Case(WIDE, adam=True, clip_norm=0.1, rows=(1, 2, 12)), Case(WIDE, blocking=True)])


STAGES = plan_of(
    Pipeline(micro_batches=3, micro_batch=3, stages=(
        stage((0, 2), ("a:0", 3), recompute=True),
        stage((2, 4), ("a:1", 2), ("a:2", 1), ep=2, recompute=True),
        stage((4, 5), ("b:0", 3)),
    )),
)  # fmt: skip
LAST = plan_of(
    Pipeline(micro_batches=2, micro_batch=5, stages=(
        stage((0, 3), ("a:0", 2), ("a:1", 3), etp=2), stage((3, 5), ("b:0", 1), ("b:1", 2), ("b:2", 2), ep=3),
    )),
    schedule=ScheduleKind.GPIPE,
)  # fmt: skip


def test_stages_that_share_experts_between_stages_that_do_not():
    check([Case(STAGES, clip_norm=0.2), Case(STAGES, rows=(1, 4, 2), blocking=True)])


def test_experts_in_parts_then_a_last_stage_with_uneven_experts():
    """Five experts on three ranks; two guests at once, in the stage with the loss."""
    check([Case(LAST, adam=True), Case(LAST, rows=(2, 5, 1), blocking=True)])


UNLIKE = plan_of(
    Pipeline(micro_batches=2, micro_batch=4, stages=(
        stage((0, 5), ("a:0", 1), ("a:1", 1), ("b:0", 1), ("b:1", 1), ep=2, etp=2),
    )),
    Pipeline(micro_batches=3, micro_batch=2, stages=(
        stage((0, 2), ("c:0", 2)), stage((2, 5), ("c:1", 2)),
    )),
)  # fmt: skip
COPIES = plan_of(
    Pipeline(micro_batches=2, micro_batch=5, stages=(
        stage((0, 5), ("a:0", 1), ("b:0", 2), ("a:1", 1), ("b:1", 1), ep=2),
    )),
    Pipeline(micro_batches=1, micro_batch=3, stages=(stage((0, 5), ("c:0", 1), ("c:1", 2), etp=2),)),
)  # fmt: skip


def test_pipelines_whose_tilings_differ_sum_cells():
    """Of 2 x 2 tiles, of whole blocks cut elsewhere, of two copies beside experts in halves."""
    check([Case(UNLIKE), Case(UNLIKE, adam=True, clip_norm=0.1, blocking=True)])
    check([Case(COPIES, rows=(13, 3, 8)), Case(COPIES, blocking=True)])


MIXED = plan_of(
    Pipeline(micro_batches=2, micro_batch=4, stages=(
        stage((0, 2), (("a:0", "a:1"), 4), ep=2),
        stage((2, 5), (("b:0", "b:1"), 3), (("c:1", "c:0"), 1), ep=2, recompute=True),
    )),
)  # fmt: skip
REPLICATED = plan_of(
    Pipeline(micro_batches=2, micro_batch=2, stages=(stage((0, 5), (("a:0", "a:1", "a:2"), 2)),)),
    Pipeline(micro_batches=2, micro_batch=3, stages=(
        stage((0, 3), (("b:0", "b:1"), 3), etp=2), stage((3, 5), ("c:0", 3)),
    )),
)  # fmt: skip
UNLIKE_REPLICAS = plan_of(
    Pipeline(micro_batches=2, micro_batch=4, stages=(
        stage((0, 5), (("a:0", "a:1"), 3), ("b:0", 1), ep=3),
    )),
)  # fmt: skip


def test_replicas_of_unlike_degrees_share_experts():
    """What one of them looks at in the first step must not wait for the other."""
    check([Case(UNLIKE_REPLICAS), Case(UNLIKE_REPLICAS, rows=(1, 7, 8), blocking=True)])


def test_tensor_parallel_attention_beside_shared_experts():
    """Each token is dispatched once: of those that all devices of a replica have, each sends a part."""
    check([Case(MIXED, clip_norm=0.1), Case(MIXED, adam=True, rows=(1, 7, 2), blocking=True)])
    check([Case(REPLICATED, clip_norm=0.1), Case(REPLICATED, rows=(3, 10, 1), blocking=True)])


TURNS = plan_of(
    Pipeline(micro_batches=3, micro_batch=3, stages=(
        stage((0, 1), ("a:0", 2), ("a:1", 1)), stage((1, 2), ("b:0", 1), ("b:1", 2)),
        stage((2, 3), ("a:0", 2), ("a:1", 1), ep=2),
        stage((3, 5), ("b:0", 1), ("b:1", 2), ep=2, recompute=True),
    )),
    schedule=ScheduleKind.INTERLEAVED,
)  # fmt: skip


def test_interleaved_and_zero_bubble_plans():
    """A device that shares experts in one of its stages plays its guests in all of them."""
    zero_bubble = msgspec.structs.replace(STAGES, schedule=ScheduleKind.ZERO_BUBBLE)
    check([Case(zero_bubble, clip_norm=0.2), Case(zero_bubble, rows=(4, 1, 2), blocking=True)])
    check([Case(TURNS, clip_norm=0.2), Case(TURNS, rows=(9, 4, 1), blocking=True)])


def test_random_tilings():
    source = random.Random(11)
    cases = [random_experts_case(source, index) for index in range(5)]
    for _, case, what in compare([(MIXTURE, case) for case in cases]):
        assert isinstance(what, Gap), what
        assert largest(case, what) < MIXTURE.bound_of(case), (case, what)


def test_compiled_blocks_leave_experts_and_added_losses_as_they_are():
    check([Case(WIDE, compiled="eager", rows=(12, 1, 7))])
