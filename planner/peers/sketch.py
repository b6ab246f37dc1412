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
    tile: tuple[int, int] | None = None
    """(EP, ETP) of its experts; None: whole experts where they fit, else divided by each TP group."""


@dataclass(frozen=True, slots=True)
class _Fitting:
    """How a stage fits."""

    recompute: bool
    tile: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PipelineSketch:
    """Stages in order, and how many micro-batches pass through them."""

    micro_batches: int
    stages: tuple[StageSketch, ...]


def drawn(site: Site, pipelines: Sequence[PipelineSketch], kind: ScheduleKind) -> Plan | None:
    """The plan, with recomputation in the stages that fit only so; None where one does not fit at all."""
    built = []
    known: dict[object, _Fitting | None] = {}
    for sketch in pipelines:
        stages = []
        for s, stage in enumerate(sketch.stages):
            held = in_flight(kind, s, len(sketch.stages), sketch.micro_batches)
            hardware = tuple(zip(types_of(site.request, stage.seats), map(len, stage.seats), strict=True))
            key = stage.start, stage.stop, hardware, stage.shares, held, stage.tile
            if key not in known:
                known[key] = _fitting(site, stage, hardware, held)
            found = known[key]
            if found is None:
                return None
            stages.append(_stage(stage, found))
        size = sum(sketch.stages[0].shares)
        built.append(Pipeline(micro_batches=sketch.micro_batches, micro_batch=size, stages=tuple(stages)))
    return Plan(
        model=site.request.model.name,
        global_batch=site.request.global_batch,
        sequence=site.request.model.sequence,
        schedule=kind,
        pipelines=tuple(built),
    )


def _fitting(
    site: Site, stage: StageSketch, hardware: tuple[tuple[str, int], ...], held: int
) -> _Fitting | None:
    """Without recomputation if it fits so, with whole experts if they fit; None where nothing fits."""
    alike = dict.fromkeys(zip(hardware, stage.shares, strict=True))
    tiles = _tiles(site, hardware) if stage.tile is None else [stage.tile]
    for again in (False, True):
        for tile in tiles:
            if all(
                site.seconds(kind, tp, share) is not None
                and site.reach(kind, tp, share, held, again, tile[0] * tile[1])[stage.start] >= stage.stop
                for (kind, tp), share in alike
            ):
                return _Fitting(again, tile)
    return None


def _tiles(site: Site, hardware: tuple[tuple[str, int], ...]) -> list[tuple[int, int]]:
    degrees = {tp for _, tp in hardware}
    return [(1, 1)] if not site.num_experts or len(degrees) > 1 else [(1, tp) for tp in (1, *(degrees - {1}))]


def _stage(stage: StageSketch, found: _Fitting) -> Stage:
    replicas = tuple(
        Replica(devices=seat, share=share) for seat, share in zip(stage.seats, stage.shares, strict=True)
    )
    return Stage(
        layers=(stage.start, stage.stop),
        recompute=found.recompute,
        expert_parallel=found.tile[0],
        expert_tensor=found.tile[1],
        replicas=replicas,
    )
