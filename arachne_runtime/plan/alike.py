"""Pipelines of a plan that differ in nothing but the names of their devices, and names written short."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from .cluster import Cluster, index_of, node_of
from .plan import Pipeline, Plan


@dataclass(frozen=True, slots=True)
class Alike:
    """Pipelines with equal micro-batches, cuts, shares, TP degrees and, where known, device types."""

    pipelines: tuple[int, ...]
    """Their numbers, ascending."""
    first: Pipeline


def alike(plan: Plan, cluster: Cluster | None = None) -> tuple[Alike, ...]:
    """The pipelines of a plan in groups, in order of first appearance."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        groups.setdefault(_shape(pipeline, cluster), []).append(p)
    return tuple(Alike(tuple(members), plan.pipelines[members[0]]) for members in groups.values())


def _shape(pipeline: Pipeline, cluster: Cluster | None) -> tuple[object, ...]:
    stages = tuple(
        (
            stage.layers,
            stage.recompute,
            stage.zero,
            stage.expert_parallel,
            stage.expert_tensor,
            tuple(
                (r.share, len(r.devices), cluster.device_type(r.devices[0]) if cluster else None)
                for r in stage.replicas
            ),
        )
        for stage in pipeline.stages
    )
    return pipeline.micro_batches, pipeline.micro_batch, stages


def short(devices: Iterable[str]) -> str:
    """``a-0:0 a-0:1 a-0:2 b:0`` → ``a-0:0-2 b:0``."""
    parts = []
    for node, members in groupby(devices, key=node_of):
        for first, last in _runs([index_of(device) for device in members]):
            parts.append(f"{node}:{first}" if first == last else f"{node}:{first}-{last}")
    return " ".join(parts)


def numbers(values: Iterable[int]) -> str:
    """``0 1 2 5`` → ``0-2, 5``."""
    runs = _runs(list(values))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _runs(values: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] + 1 == value:
            runs[-1] = runs[-1][0], value
        else:
            runs.append((value, value))
    return runs
