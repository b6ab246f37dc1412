"""What lies between the ideal and a plan's iteration, in seconds that add up to it (docs/reading-a-plan.md).

All devices of the cluster for the whole iteration are a budget of ``iteration x total speed`` samples. Each
loss is the part of that budget that went there, over the total speed: so it is in seconds of the iteration.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Pipeline, Plan, ScheduleKind, Stage
from arachne_runtime.plan.schedule import num_rows
from arachne_runtime.units import Seconds

from ..cost import Estimate, Ideal, Infeasible, price
from ..cost.simulate import Actor, play
from ..request import Request

_AT_ONCE = ((0, 0.0),)
"""Messages of the one neighbour, which take no time."""


class LossKind(StrEnum):
    """Where the time of devices goes that the ideal does not need."""

    IDLE = "idle devices"
    """Devices without a stage, for the whole iteration."""
    GRANULARITY = "granularity"
    """Waiting in pipelines beyond their bubbles: stages, shares and pipelines that are not equally long."""
    BUBBLES = "bubbles"
    """What a pipeline of equal stages, as deep and with as many micro-batches, leaves empty."""
    SMALL_SHARES = "small micro-batches"
    """Computing that a replica's share takes beyond the best one that was measured."""
    PLACEMENT = "placement"
    """Blocks on types that are slower at them than at the whole model; below 0 where they are quicker."""
    RECOMPUTE = "recomputation"
    """Forwards that are computed again."""
    TENSOR = "tensor parallelism"
    """What a TP group takes beyond its devices alone at the same share, its collectives included."""
    HOPS = "hops"
    """What messages add to the slowest pipeline: between stages, to experts, of ZeRO's shards."""
    SYNC = "synchronisation"
    """From the last action of all pipelines to the last sum of gradients."""
    UPDATE = "optimizer and fixed costs"
    """From there to the end of the iteration."""


class Loss(Document, frozen=True, kw_only=True):
    """One part of the iteration."""

    kind: LossKind
    seconds: Seconds


class Losses(Document, frozen=True, kw_only=True):
    """The iteration as the ideal and what comes on top of it."""

    iteration_s: Seconds
    ideal_s: Seconds
    parts: tuple[Loss, ...]
    """One for each kind, in the order of ``LossKind``; ``ideal_s`` and they add up to ``iteration_s``."""

    @property
    def share_of_ideal(self) -> float:
        """Ideal over actual, 0 to 1."""
        return self.ideal_s / self.iteration_s

    def seconds(self, kind: LossKind) -> Seconds:
        """Of one kind."""
        return next(loss.seconds for loss in self.parts if loss.kind is kind)


def share_of_ideal(plan: Plan, request: Request) -> Losses:
    """What share of the ideal a plan reaches and what takes the rest.

    Raises NoFeasiblePlanError where the plan does not fit, and what the price raises.
    """
    found = price(plan, request)
    if isinstance(found, Infeasible):
        raise NoFeasiblePlanError(found.reason)
    return losses_of(plan, found, request)


def losses_of(plan: Plan, estimate: Estimate, request: Request) -> Losses:
    """As ``share_of_ideal``, of a plan that was priced."""
    ideal = Ideal(request)
    spent = _computing(plan, ideal)
    for kind, samples in _waiting(plan, estimate, ideal).items():
        spent[kind] += samples
    used = set(plan.devices)
    idle = [device for device in request.cluster.devices if device not in used]
    spent[LossKind.IDLE] = estimate.iteration_s * sum(
        ideal.speeds[request.cluster.device_type(device)] for device in idle
    )
    parts = tuple(Loss(kind=kind, seconds=spent[kind] / ideal.total_speed) for kind in LossKind)
    return Losses(iteration_s=estimate.iteration_s, ideal_s=ideal.iteration_s, parts=parts)


def _computing(plan: Plan, ideal: Ideal) -> dict[LossKind, float]:
    """Samples' worth of computing beyond the ideal's, by kind."""
    spent: dict[LossKind, float] = defaultdict(float)
    trained = 0.0
    known: dict[tuple[object, ...], _Work] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                device = ideal.request.cluster.device_type(replica.devices[0])
                tp, share = len(replica.devices), replica.share
                key = stage.layers, stage.recompute, device, tp, share
                work = known.get(key)
                if work is None:
                    work = known[key] = _work_of(stage, device, tp, share, ideal)
                weight = ideal.speeds[device] * tp * pipeline.micro_batches
                spent[LossKind.RECOMPUTE] += weight * work.recompute_s
                spent[LossKind.TENSOR] += weight * (work.plain_s - work.alone_s)
                spent[LossKind.SMALL_SHARES] += weight * (work.alone_s - work.best_s)
                trained += weight * work.best_s
    spent[LossKind.PLACEMENT] = trained - plan.global_batch
    return spent


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of one micro-batch on each device of a replica, with ever more of it taken away."""

    recompute_s: Seconds
    plain_s: Seconds
    """Without recomputation."""
    alone_s: Seconds
    """Without tensor parallelism."""
    best_s: Seconds
    """And at the best share."""


def _work_of(stage: Stage, device: str, tp: int, share: int, ideal: Ideal) -> _Work:
    tables = ideal.request.tables
    plain = sum(tables.stage_seconds(*stage.layers, device, tp, share))
    whole = sum(tables.stage_seconds(*stage.layers, device, tp, share, stage.recompute))
    alone = ideal.replica_s(*stage.layers, device, tp, share)
    best = share * ideal.sample_s(*stage.layers, device) / tp
    return _Work(whole - plain, plain, alone, best)


def _waiting(plan: Plan, estimate: Estimate, ideal: Ideal) -> dict[LossKind, float]:
    """Samples that used devices could have trained while they did not compute, by kind.

    Milestones of the whole iteration: all pipelines done if messages took no time, all done, all gradients
    summed, the end. What a device waits before the first of them is bubbles and granularity of its pipeline.
    """
    parts = estimate.breakdown
    quiet_s = max(b.compute_s + b.bubble_s for b in parts.values())
    done_s = max(b.compute_s + b.bubble_s + b.hop_s for b in parts.values())
    update_s = min(b.update_s for b in parts.values())
    spent: dict[LossKind, float] = defaultdict(float)
    for pipeline in plan.pipelines:
        speeds = {d: ideal.speeds[ideal.request.cluster.device_type(d)] for d in _devices(pipeline)}
        speed = sum(speeds.values())
        computing = sum(v * parts[d].compute_s for d, v in speeds.items()) / speed
        bubble = min(_bubble_s(plan, pipeline, computing), quiet_s - computing)
        spent[LossKind.BUBBLES] += speed * bubble
        spent[LossKind.GRANULARITY] += speed * (quiet_s - computing - bubble)
        spent[LossKind.HOPS] += speed * (done_s - quiet_s)
        spent[LossKind.SYNC] += speed * (estimate.iteration_s - update_s - done_s)
        spent[LossKind.UPDATE] += speed * update_s
    return spent


def _devices(pipeline: Pipeline) -> tuple[str, ...]:
    return tuple(dict.fromkeys(d for stage in pipeline.stages for d in stage.devices))


def _bubble_s(plan: Plan, pipeline: Pipeline, computing_s: Seconds) -> Seconds:
    """Idle time of each device in a pipeline of equal stages that computes ``computing_s`` on each.

    A backward takes two thirds of a micro-batch, half of it for weights: it has two products of matrices for
    each one of the forward.
    """
    depth, count = len(pipeline.stages), pipeline.micro_batches
    rows = num_rows(plan.schedule, pipeline)
    forward = computing_s / count / (depth // rows) / 3
    alike = Actor(
        forward, 2 * forward, weight_s=forward if plan.schedule is ScheduleKind.ZERO_BUBBLE else 0.0
    )
    before, behind = replace(alike, from_before=_AT_ONCE), replace(alike, from_behind=_AT_ONCE)
    chain = (
        (behind, *(replace(before, from_behind=_AT_ONCE),) * (depth - 2), before) if depth > 1 else (alike,)
    )
    played = play(plan.schedule, count, tuple((actor,) for actor in chain), rows)
    return max(0.0, played.seconds - computing_s)
