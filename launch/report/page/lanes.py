"""What the page draws: a lane for each replica that has a timeline of its own, alike ones drawn once."""

from collections.abc import Iterator
from dataclasses import dataclass

from arachne_runtime.plan.alike import alike
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import Pipeline, Plan, Replica
from planner.cost import Estimate, Span

from .colours import MOST_HUES, stage_colour


@dataclass(frozen=True, slots=True)
class Lane:
    """Replicas with one timeline."""

    stages: tuple[int, ...]
    """Several with an interleaved schedule."""
    devices: tuple[str, ...]
    """Of one of them: its tensor-parallel group."""
    copies: int
    """Replicas like it in the stage."""
    share: int
    colour: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """The lanes of alike pipelines with equal timelines; those of the first one stand for all."""

    pipelines: tuple[int, ...]
    first: Pipeline
    lanes: tuple[Lane, ...]


def bands(plan: Plan, estimate: Estimate, cluster: Cluster) -> tuple[Band, ...]:
    """All pipelines, in order."""
    colours = colours_of(plan, cluster)
    found = []
    for group in alike(plan, cluster):
        by_times: dict[object, list[int]] = {}
        for p in group.pipelines:
            by_times.setdefault(_times(plan.pipelines[p], estimate), []).append(p)
        for members in by_times.values():
            first = plan.pipelines[members[0]]
            found.append(Band(tuple(members), first, tuple(_lanes(first, estimate, colours[members[0]]))))
    return tuple(sorted(found, key=lambda band: band.pipelines))


def colours_of(plan: Plan, cluster: Cluster) -> list[list[str]]:
    """Of every pipeline's stages: a hue each, or one for alike pipelines where there are many."""
    groups = alike(plan, cluster)
    hue_of = {p: p for p in range(len(plan.pipelines))}
    if len(plan.pipelines) > MOST_HUES:
        hue_of = {p: g for g, group in enumerate(groups) for p in group.pipelines}
    num_hues = max(hue_of.values()) + 1
    return [
        [stage_colour(hue_of[p], num_hues, s, len(pipeline.stages)) for s in range(len(pipeline.stages))]
        for p, pipeline in enumerate(plan.pipelines)
    ]


def _times(pipeline: Pipeline, estimate: Estimate) -> object:
    """To the microsecond: rounding of sums does not make two timelines."""
    return tuple(
        (span.name, round(span.start_s, 6), round(span.end_s, 6))
        for stage in pipeline.stages
        for replica in stage.replicas
        for span in estimate.timeline[replica.devices[0]]
    )


def _lanes(pipeline: Pipeline, estimate: Estimate, colours: list[str]) -> Iterator[Lane]:
    stages_of: dict[tuple[str, ...], list[int]] = {}
    for s, stage in enumerate(pipeline.stages):
        for replica in stage.replicas:
            stages_of.setdefault(replica.devices, []).append(s)
    told: set[tuple[str, ...]] = set()
    for s, stage in enumerate(pipeline.stages):
        groups: dict[object, list[Replica]] = {}
        for replica in stage.replicas:
            if replica.devices not in told:
                told.add(replica.devices)
                spans = estimate.timeline[replica.devices[0]]
                groups.setdefault((replica.share, len(replica.devices), spans), []).append(replica)
        for members in groups.values():
            first = members[0]
            spans = estimate.timeline[first.devices[0]]
            stages = tuple(stages_of[first.devices])
            yield Lane(stages, first.devices, len(members), first.share, colours[s], spans)
