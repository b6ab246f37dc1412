"""The price of a plan (docs/cost-model.md): memory first, then the event simulation and what follows it."""

from typing import TYPE_CHECKING

import msgspec

from arachne_runtime.errors import NoFeasiblePlanError, UnsupportedPlanError
from arachne_runtime.plan.plan import Plan, Predicted, Stage
from arachne_runtime.plan.schedule import PLAYABLE
from arachne_runtime.units import Bytes, Seconds

from .actors import Seat, Seats, actors_of, crossings, crowd_of, seats_of
from .detail import Run, explain
from .estimate import Estimate, Infeasible, Price
from .memory import in_flight, stage_memory
from .simulate import Played, Stages, play
from .sync import commit_seconds, reduce, reductions_of
from .tables import Tables

if TYPE_CHECKING:  # a request makes its tables, so it imports this package
    from ..request import Request


def price(plan: Plan, request: "Request") -> Price:
    """Seconds of one iteration, or why the plan does not fit.

    Raises NotMeasuredError where the profile does not reach, UnsupportedPlanError for a schedule, ZeRO stage
    or expert tiling without a price, UsageError for devices that the cluster does not have.
    """
    _refuse_unpriced(plan)
    tables = request.tables
    seats = seats_of(plan, tables)
    peaks, worst = peaks_of(plan, seats, tables)
    if worst is not None:
        return worst
    run = simulate(plan, seats, tables)
    return Estimate(
        iteration_s=run.iteration_s,
        samples_per_s=plan.global_batch / run.iteration_s,
        peak_bytes=peaks,
        not_measured=tables.not_measured,
        _trace=lambda: explain(plan, run, tables),
    )


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
    stages: list[Stages] = []
    played: list[Played] = []
    known: dict[tuple[int, Stages], Played] = {}
    for pipeline, seated, crossed in zip(plan.pipelines, seats, boundaries, strict=True):
        actors = actors_of(pipeline, seated, crossed, crowd, tables)
        key = (pipeline.micro_batches, actors)
        if key not in known:
            known[key] = play(plan.schedule, pipeline.micro_batches, actors)
        stages.append(actors)
        played.append(known[key])
    reductions = reductions_of(plan, seats, tables)
    spans, free = reduce(reductions, played)
    commit = max(max(map(max, f)) for f in free) + commit_seconds(seats, tables)
    updates = _updates(plan, seats, tables)
    end = commit + max(max(map(max, u)) for u in updates) + tables.profile.step_s
    return Run(seats, tuple(stages), tuple(played), reductions, spans, commit, updates, end)


def _refuse_unpriced(plan: Plan) -> None:
    """UnsupportedPlanError for what this version has no price for."""
    if plan.schedule not in PLAYABLE:
        raise UnsupportedPlanError(
            f"schedule {plan.schedule} has no price yet; use one of {', '.join(PLAYABLE)}"
        )
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.zero > 1 or stage.expert_parallel > 1 or stage.expert_tensor > 1:
                raise UnsupportedPlanError(
                    f"$.pipelines[{p}].stages[{s}]: ZeRO {stage.zero} and experts {stage.expert_parallel} × "
                    f"{stage.expert_tensor} have no price yet; use zero 0 or 1 and no expert parallelism"
                )


def _updates(plan: Plan, seats: Seats, tables: Tables) -> list[list[list[Seconds]]]:
    """Seconds of each replica's optimizer; ZeRO-1 gives each replica of a stage its part."""
    return [
        [
            [
                tables.update_seconds(*stage.layers, seat.node.device.name, seat.tp)
                / (len(stage.replicas) if stage.zero else 1)
                for seat in seated
            ]
            for stage, seated in zip(pipeline.stages, seated_stages, strict=True)
        ]
        for pipeline, seated_stages in zip(plan.pipelines, seats, strict=True)
    ]


def peaks_of(plan: Plan, seats: Seats, tables: Tables) -> tuple[dict[str, Bytes], Infeasible | None]:
    """Peak bytes by device, and the device that lacks most where any lacks some."""
    peaks: dict[str, Bytes] = {}
    worst: Infeasible | None = None
    for p, pipeline in enumerate(plan.pipelines):
        depth = len(pipeline.stages)
        for s, stage in enumerate(pipeline.stages):
            held = in_flight(plan.schedule, s, depth, pipeline.micro_batches)
            for seat in seats[p][s]:
                peak = _peak(stage, seat, held, tables)
                peaks.update(dict.fromkeys(seat.replica.devices, peak))
                over = peak - seat.node.memory_bytes
                if over > 0 and (worst is None or over > worst.over_bytes):
                    worst = Infeasible(
                        pipeline=p,
                        stage=s,
                        device=seat.replica.devices[0],
                        needed_bytes=peak,
                        available_bytes=seat.node.memory_bytes,
                    )
    return peaks, worst


def _peak(stage: Stage, seat: Seat, held: int, tables: Tables) -> Bytes:
    start, stop = stage.layers
    memory = stage_memory(
        tables,
        start=start,
        stop=stop,
        device=seat.node.device.name,
        tp=seat.tp,
        samples=seat.replica.share,
        held=held,
        recompute=stage.recompute,
        zero=stage.zero,
        width=len(stage.replicas),
    )
    return memory.total + seat.node.device.reserve_bytes
