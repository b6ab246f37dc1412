"""Plans as rival planners draw them, stages with devices and shares; recomputation is filled in here."""

from collections.abc import Sequence
from dataclasses import dataclass

from arachne_runtime.plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage

from ..cost.memory import in_flight
from .site import Seat, Site, types_of


@dataclass(frozen=True, slots=True)
class StageSketch:
    """A run of blocks on replicas."""

    start: int
    stop: int
    seats: tuple[Seat, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelineSketch:
    """Stages in order, and how many micro-batches pass through them."""

    micro_batches: int
    stages: tuple[StageSketch, ...]


def drawn(site: Site, pipelines: Sequence[PipelineSketch], kind: ScheduleKind) -> Plan | None:
    """The plan, with recomputation in the stages that fit only so; None where one does not fit at all."""
    built = []
    known: dict[object, bool | None] = {}
    for sketch in pipelines:
        stages = []
        for s, stage in enumerate(sketch.stages):
            held = in_flight(kind, s, len(sketch.stages), sketch.micro_batches)
            hardware = tuple(zip(types_of(site.request, stage.seats), map(len, stage.seats), strict=True))
            key = stage.start, stage.stop, hardware, stage.shares, held
            if key not in known:
                known[key] = _recompute(site, stage, hardware, held)
            recompute = known[key]
            if recompute is None:
                return None
            stages.append(_stage(site, stage, recompute))
        size = sum(sketch.stages[0].shares)
        built.append(Pipeline(micro_batches=sketch.micro_batches, micro_batch=size, stages=tuple(stages)))
    return Plan(
        model=site.request.model.name,
        global_batch=site.request.global_batch,
        sequence=site.request.model.sequence,
        schedule=kind,
        pipelines=tuple(built),
    )


def _recompute(
    site: Site, stage: StageSketch, hardware: tuple[tuple[str, int], ...], held: int
) -> bool | None:
    """Whether a stage has to recompute its activations; None where it does not fit even so."""
    alike = dict.fromkeys(zip(hardware, stage.shares, strict=True))
    for again in (False, True):
        if all(
            site.seconds(kind, tp, share) is not None
            and site.reach(kind, tp, share, held, again)[stage.start] >= stage.stop
            for (kind, tp), share in alike
        ):
            return again
    return None


def _stage(site: Site, stage: StageSketch, recompute: bool) -> Stage:
    replicas = tuple(
        Replica(devices=seat, share=share) for seat, share in zip(stage.seats, stage.shares, strict=True)
    )
    return Stage(layers=(stage.start, stage.stop), recompute=recompute, replicas=replicas)
