"""Random plans that follow one another in a running job, against a single process that knows none."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from msgspec.structs import replace as with_fields

from arachne_runtime.engine import Engine
from arachne_runtime.measure.recorder import Silence
from arachne_runtime.plan.placement import rank_order
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
from arachne_runtime.plan.rules import check_plan
from arachne_runtime.state.changes import PlanChange, PlanChanges

from .cases import STEPS, Outcome, engine_of
from .exactness_frame import Kind, random_settings
from .exactness_plans import random_plan
from .exactness_tensor import BLOCKS, TensorCase, random_tensor_plan

TOTAL_ROWS = 12
"""Of a global batch, whatever the plan."""
DEVICES = {2: ("a:0", "b:0"), 3: ("a:0", "b:0", "b:1"), 4: ("b:0", "a:0", "a:1", "c:0")}
"""Of plans without tensor parallelism, by their number; plans may number them otherwise."""
ZERO_SHARE = 0.7
"""Stages of several replicas that split their states, where a case has such at all."""


@dataclass(frozen=True)
class ReplanCase(TensorCase):
    """A case whose plan changes before each step but the first."""

    next_plans: tuple[Plan, ...] = ()


def train_through(
    case: ReplanCase, seen: Callable[[Engine, PlanChange | None], None] = lambda engine, change: None
) -> Outcome:
    """Train by one plan after the other; ``seen`` looks at each, at the first without a change."""
    engine = engine_of(case)
    changes = changes_of(engine)
    changes.listeners.append(lambda change: seen(engine, change))
    seen(engine, None)
    found = Outcome()
    for step in range(STEPS):
        if step:
            changes.to(case.next_plans[step - 1])
        report = engine.step(case.batch(step))
        found.losses.append(report.loss)
        found.norms.append(report.grad_norm)
    found.parameters = {name: p.detach().clone() for name, p in engine.named_parameters()}
    found.held = engine.held_parts()
    engine.close()
    return found


def changes_of(engine: Engine) -> PlanChanges:
    """Of an engine that no session made."""
    return PlanChanges(engine, rank_order(engine.plan), lambda plan, rank: (Silence(), None))


def random_replan_case(source: random.Random, index: int, *, zero: bool = False) -> ReplanCase:
    """By turns tensor-parallel plans of one node, and plans of any schedule over several."""
    num_ranks, shared = source.randint(2, 4), index % 2 == 0
    plans = [_one_of(source, num_ranks, shared=shared) for _ in range(STEPS)]
    if zero:
        plans = [_with_zero(source, plan) for plan in plans]
    drawn = random_settings(source, plans[0], index // 2, single_share=10**9, scheduled=0.5)
    case = ReplanCase(**drawn, next_plans=tuple(plans[1:]), fused=source.random() < 0.5)
    return replace(case, evaluates=False)


def _one_of(source: random.Random, num_ranks: int, *, shared: bool) -> Plan:
    """A random plan of all devices and ``TOTAL_ROWS`` rows."""
    while True:
        plan = (
            random_tensor_plan(source, num_ranks)
            if shared and num_ranks > 1 and source.random() < 0.7
            else _cut_to(random_plan(source, source.choice(tuple(ScheduleKind))))
        )
        if tuple(check_plan(plan)) or len(plan.devices) != num_ranks:
            continue
        if (counts := _counts(source, plan)) is not None:
            names = [f"a:{i}" for i in range(num_ranks)] if shared else list(DEVICES[num_ranks])
            return _renamed(plan, counts, dict(zip(plan.devices, names, strict=True)))


def _cut_to(plan: Plan) -> Plan:
    """A plan of one block more, without it."""

    def cut(stage: Stage) -> Stage:
        return with_fields(stage, layers=(stage.layers[0], min(stage.layers[1], BLOCKS)))

    return with_fields(
        plan,
        pipelines=tuple(
            with_fields(p, stages=tuple(cut(s) for s in p.stages if s.layers[0] < BLOCKS))
            for p in plan.pipelines
        ),
    )


def _counts(source: random.Random, plan: Plan) -> tuple[int, ...] | None:
    """Micro-batches of each pipeline that make up the global batch; None where some draws found none."""
    sizes = [pipeline.micro_batch for pipeline in plan.pipelines]
    for _ in range(20):
        counts = [source.randint(1, 4) for _ in sizes]
        rest = TOTAL_ROWS - sum(c * size for c, size in zip(counts[1:], sizes[1:], strict=True))
        if rest > 0 and rest % sizes[0] == 0:
            return rest // sizes[0], *counts[1:]
    return None


def _renamed(plan: Plan, counts: tuple[int, ...], names: dict[str, str]) -> Plan:
    def of_replica(replica: Replica) -> Replica:
        return with_fields(replica, devices=tuple(names[device] for device in replica.devices))

    def of_stage(stage: Stage) -> Stage:
        return with_fields(stage, replicas=tuple(map(of_replica, stage.replicas)))

    def of_pipeline(pipeline: Pipeline, count: int) -> Pipeline:
        stages = tuple(map(of_stage, pipeline.stages))
        return with_fields(pipeline, micro_batches=count, stages=stages)

    pipelines = tuple(map(of_pipeline, plan.pipelines, counts))
    return with_fields(plan, pipelines=pipelines, global_batch=TOTAL_ROWS)


def _with_zero(source: random.Random, plan: Plan) -> Plan:
    pipelines = []
    for pipeline in plan.pipelines:
        chosen: dict[str, int] = {}
        zero = [chosen.setdefault(s.devices[0], source.random() < ZERO_SHARE) for s in pipeline.stages]
        stages = (with_fields(s, zero=int(z)) for s, z in zip(pipeline.stages, zero, strict=True))
        pipelines.append(with_fields(pipeline, stages=tuple(stages)))
    return with_fields(plan, pipelines=tuple(pipelines))


REPLANS = Kind(name="replans", draw=random_replan_case, by_plan=train_through, full=40, quick=4)
REPLANS_ZERO = Kind(
    name="replans-zero",
    draw=partial(random_replan_case, zero=True),
    by_plan=train_through,
    full=12,
    quick=2,
    needs="deepspeed",
)
