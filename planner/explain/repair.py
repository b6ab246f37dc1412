"""A plan that does not fit: the changes of the plan itself with which it would, each priced."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Pipeline, Plan, Stage
from arachne_runtime.units import Seconds, format_seconds

from ..cost import Estimate, Infeasible, price
from ..request import MOST_ZERO, Request


class Repair(Document, frozen=True, kw_only=True):
    """One change that makes a plan fit."""

    text: str
    iteration_s: Seconds

    def __str__(self) -> str:
        return f"{self.text}: {format_seconds(self.iteration_s)} an iteration"


def repairs(plan: Plan, misfit: Infeasible, request: Request) -> tuple[Repair, ...]:
    """What would make a plan fit on the devices that it has, the fastest first; empty where nothing does.

    ``misfit``: what its price says.
    """
    found = []
    for text, changed in _changes(plan, misfit):
        try:
            outcome = price(changed, request)
        except NotMeasuredError:
            continue
        if isinstance(outcome, Estimate):
            found.append(Repair(text=text, iteration_s=outcome.iteration_s))
    return tuple(sorted(found, key=lambda repair: repair.iteration_s))


def _changes(plan: Plan, misfit: Infeasible) -> Iterator[tuple[str, Plan]]:
    where = misfit.pipeline, misfit.stage
    yield f"recomputation in stage {misfit.stage} of pipeline {misfit.pipeline}", _stages(plan, _again, where)
    everywhere = _stages(plan, _again)
    yield "recomputation everywhere", everywhere
    for zero in range(1, MOST_ZERO + 1):
        yield f"ZeRO {zero} where stages have several replicas", _stages(plan, _sharding(zero))
    halved = _halved(plan)
    if halved is not None:
        yield "micro-batches of half the samples, twice as many", halved
        yield "the same and recomputation everywhere", _stages(halved, _again)


def _again(stage: Stage) -> Stage:
    return replace(stage, recompute=True)


def _sharding(zero: int) -> Callable[[Stage], Stage]:
    return lambda stage: replace(stage, zero=zero) if len(stage.replicas) > 1 else stage


def _stages(plan: Plan, change: Callable[[Stage], Stage], only: tuple[int, int] | None = None) -> Plan:
    """The plan with every stage changed, or one of them."""

    def changed(p: int, pipeline: Pipeline) -> Pipeline:
        stages = (
            change(stage) if only in (None, (p, s)) else stage for s, stage in enumerate(pipeline.stages)
        )
        return replace(pipeline, stages=tuple(stages))

    return replace(plan, pipelines=tuple(changed(p, pipeline) for p, pipeline in enumerate(plan.pipelines)))


def _halved(plan: Plan) -> Plan | None:
    """None where a share is odd."""
    shares = [r.share for p in plan.pipelines for s in p.stages for r in s.replicas]
    if any(share % 2 for share in shares):
        return None

    def half(stage: Stage) -> Stage:
        return replace(stage, replicas=tuple(replace(r, share=r.share // 2) for r in stage.replicas))

    return replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                micro_batches=2 * pipeline.micro_batches,
                micro_batch=pipeline.micro_batch // 2,
                stages=tuple(map(half, pipeline.stages)),
            )
            for pipeline in plan.pipelines
        ),
    )
