"""Plans without a planner: the job's first plan on the devices that are there, and back to it as they return.

Cuts, TP degrees and the global batch stay; what lost a device is left out. It knows no prices: a step is
timed by the samples that each replica takes, next to what it took before.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import lcm

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.plan import Pipeline, Plan, Predicted, Replica, Stage
from arachne_runtime.plan.schedule import num_rows

from .deal import Split, Taker, deal
from .worth import STANDSTILL_S, Offer


class Shrinker:
    """Offers for one job, by its first plan."""

    def __init__(self, first: Plan) -> None:
        self._first = first
        self._unit = first.predicted.samples_per_s if first.predicted else float(first.global_batch)
        """Samples a second of the first plan; where nobody predicted any, it makes a step a second."""

    def plan_for(self, devices: tuple[str, ...], running: Plan | None) -> Offer | None:
        """The first plan or the running one on these devices, whichever is faster; None: neither fits.

        The running plan where both are as fast, so that nothing moves for nothing.
        """
        there = frozenset(devices)
        bases = [self._first] if running is None else [running, self._first]
        found = [
            (self._rate(base) / remains.longer, remains.plan)
            for base in bases
            if (remains := shrunk(base, there)) is not None
        ]
        if not found:
            return None
        rate, plan = max(found, key=lambda one: one[0])  # the first of equals
        return Offer(
            plan=plan,
            samples_per_s=rate,
            running_samples_per_s=self._rate(running) if running is not None else 0.0,
            migration_s=0.0 if plan == running else STANDSTILL_S,  # nobody knows its bytes here
        )

    def _rate(self, plan: Plan) -> float:
        """Samples a second: as predicted, else as of the first plan on the same devices; 0: nobody knows."""
        if plan.predicted is not None:
            return plan.predicted.samples_per_s
        alike = shrunk(self._first, frozenset(plan.devices))
        return 0.0 if alike is None else self._unit / alike.longer


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a plan."""

    plan: Plan
    longer: float
    """A step, in units of the whole plan's."""


def shrunk(plan: Plan, there: Set[str]) -> Remains | None:
    """The plan without pipelines and replicas that lost a device; None where no pipeline is whole.

    It is the plan itself where none did.
    """
    if set(plan.devices) <= there:
        return Remains(plan, 1.0)
    kept = [(pipeline, stages) for pipeline in plan.pipelines if (stages := _kept(pipeline, there))]
    takers = [_taker(plan, pipeline, stages) for pipeline, stages in kept]
    try:
        splits = deal(plan.global_batch, takers)
    except NoFeasiblePlanError:
        return None
    longer = max(split.time for split in splits)
    pipelines = tuple(
        _pipeline(stages, taker, split)
        for (_, stages), taker, split in zip(kept, takers, splits, strict=True)
    )
    replaced = msgspec.structs.replace(plan, pipelines=pipelines, predicted=_predicted(plan, longer))
    return Remains(replaced, longer)


def _predicted(plan: Plan, longer: float) -> Predicted | None:
    """Of the steps; memory, which is another now, is not told."""
    if plan.predicted is None:
        return None
    return Predicted(
        iteration_s=plan.predicted.iteration_s * longer,
        samples_per_s=plan.predicted.samples_per_s / longer,
    )


def _kept(pipeline: Pipeline, there: Set[str]) -> tuple[Stage, ...]:
    """Its stages with the replicas that are whole; none where a stage has none.

    No stage keeps more replicas than the tightest one has samples for, where each takes as many as before:
    they would only wait for it.
    """
    units = [
        [unit for unit in _units(pipeline, stage) if all(there >= set(r.devices) for r in unit)]
        for stage in pipeline.stages
    ]
    if not all(units):
        return ()
    tightest = min(sum(replica.share for unit in own for replica in unit) for own in units)
    return tuple(
        _with_replicas(stage, _narrowed(own, tightest))
        for stage, own in zip(pipeline.stages, units, strict=True)
    )


def _narrowed(units: Sequence[list[Replica]], most: int) -> list[Replica]:
    kept = list(units[0])
    for unit in units[1:]:
        if len(kept) + len(unit) <= most:
            kept += unit
    return kept


def _with_replicas(stage: Stage, replicas: Iterable[Replica]) -> Stage:
    return msgspec.structs.replace(stage, replicas=tuple(replicas))


def _units(pipeline: Pipeline, stage: Stage) -> Iterator[list[Replica]]:
    """Replicas that stand and fall together: each, or as many as hold a copy of all shared-out experts."""
    same = (other for other in pipeline.stages if other.devices == stage.devices)  # interleaved, several
    group = lcm(*(other.expert_parallel * other.expert_tensor for other in same))
    unit: list[Replica] = []
    for replica in stage.replicas:
        unit.append(replica)
        if sum(len(one.devices) for one in unit) % group == 0:
            yield unit
            unit = []


def _taker(plan: Plan, pipeline: Pipeline, stages: tuple[Stage, ...]) -> Taker:
    return Taker(
        micro_batches=pipeline.micro_batches,
        depth=num_rows(plan.schedule, pipeline),
        shares=tuple(stage.shares for stage in stages),
    )


def _pipeline(stages: tuple[Stage, ...], taker: Taker, split: Split) -> Pipeline:
    dealt = zip(stages, taker.dealt(split.micro_batch), strict=True)
    return Pipeline(
        micro_batches=split.micro_batches,
        micro_batch=split.micro_batch,
        stages=tuple(_with_shares(stage, shares) for stage, shares in dealt),
    )


def _with_shares(stage: Stage, shares: tuple[int, ...]) -> Stage:
    replicas = zip(stage.replicas, shares, strict=True)
    return _with_replicas(stage, (msgspec.structs.replace(replica, share=n) for replica, n in replicas))
