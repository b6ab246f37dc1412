"""The price of a plan (docs/cost-model.md): memory first, then the event simulation and what follows it."""

from collections.abc import Iterator, Set
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.order import sum_starts
from arachne_runtime.plan.plan import Pipeline, Plan, Predicted, ScheduleKind, Stage
from arachne_runtime.plan.schedule import deferred, in_flight, row_actions
from arachne_runtime.units import HOUR_S, Bytes, Seconds

from .actors import (
    WEIGHTS_OF_BACKWARD,
    Seat,
    Seats,
    actors_of,
    crossings,
    crowd_of,
    seats_of,
    what_actors_depend_on,
)
from .detail import Run, explain
from .estimate import Estimate, Infeasible, Price
from .memory import SMALL_BYTES, StageMemory, stage_memory, together
from .money import devices_per_hour, traffic_price
from .played import played_peak
from .simulate import Played, Stages, play
from .sync import commit_seconds, reduce, reductions_of, rows_of
from .tables import Tables
from .tiling import tiling_of
from .zero import ZeroTraffic

if TYPE_CHECKING:  # a request makes its tables, so it imports this package
    from ..request import Request


SPLIT_MARGIN = 1.005
"""Stages whose backwards are split held up to 0.43 % more than is counted (python -m bench.memory --quick,
2026-11-30)."""


def price(plan: Plan, request: "Request") -> Price:
    """Seconds of one iteration, or why the plan does not fit.

    Raises NotMeasuredError where the profile does not reach, UsageError for devices that the cluster does not
    have.
    """
    tables = request.tables
    seats = seats_of(plan, tables)
    peaks, worst = peaks_of(plan, seats, tables)
    if worst is not None:
        return worst
    run = simulate(plan, seats, tables)
    devices, traffic = devices_per_hour(plan, tables), traffic_price(plan, tables)
    iterations = HOUR_S / run.iteration_s
    hourly = None if devices is None else devices + traffic * iterations
    return Estimate(
        iteration_s=run.iteration_s,
        samples_per_s=plan.global_batch / run.iteration_s,
        peak_bytes=peaks,
        price_per_hour=hourly,
        traffic_per_hour=traffic * iterations,
        cost_per_sample=None if hourly is None else hourly / (iterations * plan.global_batch),
        currency=request.cluster.currency,
        not_measured=(*tables.not_measured, *_estimated(plan)),
        _trace=lambda: explain(plan, run, tables),
    )


def _estimated(plan: Plan) -> Iterator[str]:
    """What this plan's price has to estimate, beside what every price does."""
    if plan.schedule is ScheduleKind.ZERO_BUBBLE:
        yield f"gradients of weights: {WEIGHTS_OF_BACKWARD:.0%} of a backward, by FLOPs"
    if any(s.expert_parallel * s.expert_tensor > 1 for p in plan.pipelines for s in p.stages):
        yield "exchange of tokens: experts equally loaded"


def with_prediction(plan: Plan, request: "Request") -> Plan:
    """The plan with ``predicted`` filled in; NoFeasiblePlanError where it does not fit."""
    found = price(plan, request)
    if isinstance(found, Infeasible):
        raise NoFeasiblePlanError(found.reason)
    predicted = Predicted(
        iteration_s=found.iteration_s, samples_per_s=found.samples_per_s, peak_bytes=dict(found.peak_bytes)
    )
    return msgspec.structs.replace(plan, predicted=predicted)


def simulate(plan: Plan, seats: Seats, tables: Tables) -> Run:
    """Play one step, memory left aside."""
    boundaries = [crossings(p, s, tables) for p, s in zip(plan.pipelines, seats, strict=True)]
    crowd = crowd_of(boundaries)
    rows = rows_of(plan)
    stages: list[Stages] = []
    played: list[Played] = []
    alike: dict[object, Stages] = {}
    known: dict[tuple[int, int, Stages], Played] = {}
    for pipeline, seated, crossed, n in zip(plan.pipelines, seats, boundaries, rows, strict=True):
        like = what_actors_depend_on(pipeline, seated, crowd, tables)
        if like not in alike:
            alike[like] = actors_of(pipeline, seated, crossed, crowd, tables)
        actors = alike[like]
        key = (n, pipeline.micro_batches, actors)
        if key not in known:
            known[key] = play(plan.schedule, pipeline.micro_batches, actors, n)
        stages.append(actors)
        played.append(known[key])
    reductions = reductions_of(plan, seats, tables)
    spans, free = reduce(reductions, played, rows)
    commit = max(max(map(max, f)) for f in free) + commit_seconds(seats, tables)
    updates = _updates(plan, seats, rows, tables)
    end = commit + max(max(map(max, u)) for u in updates) + tables.profile.step_s
    return Run(seats, tuple(stages), tuple(played), reductions, spans, commit, updates, end, rows)


def _updates(plan: Plan, seats: Seats, rows: tuple[int, ...], tables: Tables) -> list[list[list[Seconds]]]:
    """Seconds of the optimizer by pipeline, row and replica.

    ZeRO gives each replica of a stage its part; below ZeRO-3 the new weights are gathered.
    """
    return [
        [
            [sum(column) for column in zip(*(by_stage[s] for s in range(row, len(by_stage), n)), strict=True)]
            for row in range(n)
        ]
        for n, by_stage in (
            (n, [_update(*both, tables) for both in zip(pipeline.stages, seated, strict=True)])
            for pipeline, seated, n in zip(plan.pipelines, seats, rows, strict=True)
        )
    ]


def _update(stage: Stage, seats: tuple[Seat, ...], tables: Tables) -> list[Seconds]:
    part = len(stage.replicas) if stage.zero else 1
    gather = ZeroTraffic.of(stage, seats, tables).gather_s if 0 < stage.zero < 3 else 0.0
    return [
        gather + tables.update_seconds(*stage.layers, seat.node.device.name, seat.tp) / part for seat in seats
    ]


def peaks_of(plan: Plan, seats: Seats, tables: Tables) -> tuple[dict[str, Bytes], Infeasible | None]:
    """Peak bytes by device, and the device that lacks most where any lacks some."""
    peaks: dict[str, Bytes] = {}
    worst: Infeasible | None = None
    known: dict[tuple[object, ...], StageMemory] = {}
    own, gradient = tables.own_parameters, tables.model.bytes_per_parameter.gradient
    starts = sum_starts(plan, [(b - a) * gradient for a, b in pairwise(own)])
    for p, (pipeline, seated, n) in enumerate(zip(plan.pipelines, seats, rows_of(plan), strict=True)):
        for row in range(n):
            for r, seat in enumerate(seated[row]):
                parts: list[StageMemory] = []
                for s in range(row, len(seated), n):
                    key = _what_memory_depends_on(pipeline, s, seated[s][r], n)
                    if key not in known:
                        known[key] = _memory(plan, pipeline, s, seated[s][r], n, starts, tables)
                    parts.append(known[key])
                peak = _peak(plan, pipeline, row, n, parts) + seat.node.device.reserve_bytes
                peaks.update(dict.fromkeys(seat.replica.devices, peak))
                over = peak - seat.node.memory_bytes
                if over > 0 and (worst is None or over > worst.over_bytes):
                    worst = Infeasible(
                        pipeline=p,
                        stage=row,
                        device=seat.replica.devices[0],
                        needed_bytes=peak,
                        available_bytes=seat.node.memory_bytes,
                    )
    return peaks, worst


def _peak(plan: Plan, pipeline: Pipeline, row: int, rows: int, parts: list[StageMemory]) -> Bytes:
    """Of a device that holds these stages: by formulas, or played where its schedule is none of theirs."""
    depth = len(pipeline.stages)
    found = {row + k * rows: m.by_action for k, m in enumerate(parts) if m.by_action is not None}
    halves = plan.schedule is ScheduleKind.ZERO_BUBBLE
    owing = all(of.owed is not None for of in found.values())
    if len(found) < len(parts) or not (len(parts) > 1 or (halves and owing)):
        return together(parts)
    if rows == 1:  # what leaves a stage is what enters the next, in the same memory
        found = {stage: of.within() for stage, of in found.items()}
    actions = row_actions(plan.schedule, row, rows, depth, pipeline.micro_batches)
    peak = played_peak(found, actions) + SMALL_BYTES
    return int(peak * SPLIT_MARGIN if halves else peak) + 1


def _what_memory_depends_on(pipeline: Pipeline, s: int, seat: Seat, rows: int) -> tuple[object, ...]:
    """Alike devices are looked at once."""
    stage, replica = pipeline.stages[s], seat.replica
    held = s, len(pipeline.stages), rows, pipeline.micro_batches
    sharing = stage.recompute, stage.zero, len(stage.replicas), stage.expert_parallel, stage.expert_tensor
    return stage.layers, held, sharing, seat.node.device.name, len(replica.devices), replica.share


def _apart(plan: Plan, stage: Stage, seat: Seat, tables: Tables) -> Bytes:
    """Gradients beside the buffers of their sums: of what replicas of a higher degree hold in smaller parts.

    A sum is of one such part, so the gradient of the whole is no view of its buffer.
    """
    device, blocks = seat.node.device.name, set(stage.blocks)
    if tables.costs(device, seat.tp, seat.replica.share).backward is None:
        return 0  # then the gradients in buffers are an estimate, too
    degrees, experts, found = dict[int, int](), set[int](), 0.0
    for other in (s for pipeline in plan.pipelines for s in pipeline.stages):
        most = max(len(replica.devices) for replica in other.replicas)
        for block in blocks.intersection(other.blocks) if most > seat.tp else ():
            degrees[block] = max(most, degrees.get(block, 1))
        if stage.expert_parallel % other.expert_parallel or stage.expert_tensor % other.expert_tensor:
            experts.update(blocks.intersection(other.blocks))
    for block, degree in degrees.items():
        spec = tables.model.blocks[block]
        whole = float(tables.whole_parameters(block, block + 1, device, degree))
        found += max(0.0, spec.parameters - spec.expert_parameters - whole) / seat.tp
    tile = stage.expert_parallel * stage.expert_tensor
    found += sum(tables.model.blocks[block].expert_parameters / tile for block in experts)
    return int(found * tables.model.bytes_per_parameter.gradient)


def _memory(
    plan: Plan, pipeline: Pipeline, s: int, seat: Seat, rows: int, starts: Set[int], tables: Tables
) -> StageMemory:
    """``starts``: first blocks of all runs whose gradients are summed at once."""
    stage, count = pipeline.stages[s], pipeline.micro_batches
    start, stop = stage.layers
    summed = len(plan.pipelines) > 1 or len(stage.replicas) > 1
    return stage_memory(
        tables,
        start=start,
        stop=stop,
        device=seat.node.device.name,
        tp=seat.tp,
        samples=seat.replica.share,
        held=in_flight(plan.schedule, s, len(pipeline.stages), count, rows),
        recompute=stage.recompute,
        zero=stage.zero,
        width=len(stage.replicas),
        deferred=deferred(plan.schedule, s, count),
        expert_parallel=stage.expert_parallel,
        expert_tensor=stage.expert_tensor,
        micro_batches=count,
        summed=summed,
        apart=_apart(plan, stage, seat, tables),
        pieces=1 + len(starts & {*stage.blocks[1:]}) if summed or seat.tp > 1 else 1,
        tiling=tiling_of(stage, seat.replica),
    )
