"""What binds a plan beside the stage that sets its pace: full memories, the slowest hop and reduction."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from arachne_runtime.plan.alike import alike
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Pipeline, Plan, Stage
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.units import Seconds, format_bytes, format_seconds

from ..cost import Estimate
from ..request import Request
from .losses import Losses, LossKind

FULL = 0.9
"""Part of a device's memory from which one more block or sample rarely fits: judged, not measured."""

MATTERS = 0.02
"""Part of the iteration below which hops and reductions are not named."""

MOST_NAMED = 3
"""Full memories that are named, the fullest first."""


class BindingKind(StrEnum):
    """What could be better."""

    MEMORY = "memory"
    HOP = "hop"
    SYNC = "synchronisation"


class Binding(Document, frozen=True, kw_only=True):
    """One thing that limits a plan."""

    kind: BindingKind
    pipeline: int | None = None
    stage: int | None = None
    """The sending one of a hop."""
    text: str
    """For a person."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Seen:
    plan: Plan
    estimate: Estimate
    request: Request


def what_binds(plan: Plan, estimate: Estimate, losses: Losses, request: Request) -> tuple[Binding, ...]:
    """What limits a plan; the stage that sets the pace is in ``Estimate.limits``."""
    seen = _Seen(plan, estimate, request)
    found = [*_memories(seen)]
    if losses.seconds(LossKind.HOPS) > MATTERS * estimate.iteration_s:
        found += _hop(seen)
    if losses.seconds(LossKind.SYNC) > MATTERS * estimate.iteration_s:
        found += _reduction(seen)
    return tuple(found)


def _where(seen: _Seen, p: int, s: int) -> str:
    stage = seen.plan.pipelines[p].stages[s]
    types = dict.fromkeys(seen.request.cluster.device_type(d) for d in stage.devices)
    return f"stage {s} of pipeline {p} ({', '.join(types)})"


def _stages(seen: _Seen) -> Iterator[tuple[int, int, str]]:
    """(pipeline, stage, device) of the first pipeline of each group of alike ones."""
    for group in alike(seen.plan, seen.request.cluster):
        for s, stage in enumerate(group.first.stages):
            for replica in stage.replicas:
                yield group.pipelines[0], s, replica.devices[0]


def _memories(seen: _Seen) -> Iterator[Binding]:
    """The fullest devices of each stage, where they are full."""
    fullest: dict[tuple[int, int], float] = {}
    for p, s, device in _stages(seen):
        part = seen.estimate.peak_bytes[device] / _room(seen, device)
        fullest[p, s] = max(fullest.get((p, s), 0.0), part)
    for (p, s), part in sorted(fullest.items(), key=lambda item: -item[1])[:MOST_NAMED]:
        if part >= FULL:
            device = seen.plan.pipelines[p].stages[s].devices[0]
            room = format_bytes(_room(seen, device))
            text = f"memory of {_where(seen, p, s)}: {100 * part:.0f} % of {room} in use"
            yield Binding(kind=BindingKind.MEMORY, pipeline=p, stage=s, text=text)


def _room(seen: _Seen, device: str) -> int:
    return seen.request.fleet.node(node_of(device)).memory_bytes


def _hop(seen: _Seen) -> Iterator[Binding]:
    """The boundary whose messages take longest."""
    hops = [
        (seconds, group.pipelines[0], s)
        for group in alike(seen.plan, seen.request.cluster)
        for s, seconds in enumerate(_hop_seconds(seen, group.first))
    ]
    if hops:
        seconds, p, s = max(hops)
        before, after = (seen.plan.pipelines[p].stages[t].devices[0] for t in (s, s + 1))
        types = " to ".join(seen.request.cluster.device_type(d) for d in (before, after))
        text = f"hop {s}→{s + 1} of pipeline {p} ({types}): {format_seconds(seconds)} a micro-batch each way"
        yield Binding(kind=BindingKind.HOP, pipeline=p, stage=s, text=text)


def _hop_seconds(seen: _Seen, pipeline: Pipeline) -> list[Seconds]:
    """Of each boundary: the least time from the end of a forward to the next stage's, less its computing."""
    forwards = [_forwards(seen, stage.devices[0]) for stage in pipeline.stages]
    found = []
    for (before, after), stage in zip(pairwise(forwards), pipeline.stages[1:], strict=True):
        computing = _forward_s(seen, stage)
        waits = [after[m][1] - computing - before[m][1] for m in before if m in after]
        found.append(max(0.0, min(waits, default=0.0)))
    return found


def _forward_s(seen: _Seen, stage: Stage) -> Seconds:
    """Of a micro-batch on the stage's first replica."""
    replica = stage.replicas[0]
    device = seen.request.cluster.device_type(replica.devices[0])
    share, tp = replica.share, len(replica.devices)
    return seen.request.tables.stage_seconds(*stage.layers, device, tp, share)[0]


def _forwards(seen: _Seen, device: str) -> dict[str, tuple[Seconds, Seconds]]:
    """Start and end of each forward of a device, by micro-batch."""
    return {
        span.name.partition("F")[2]: (span.start_s, span.end_s)
        for span in seen.estimate.timeline[device]
        if span.kind is RecordKind.ACTION and "F" in span.name
    }


def _reduction(seen: _Seen) -> Iterator[Binding]:
    spans = {
        span.name: span.end_s - span.start_s
        for _, _, device in _stages(seen)
        for span in seen.estimate.timeline[device]
        if span.kind is RecordKind.REDUCE
    }
    if spans:
        name = max(spans, key=lambda n: spans[n])
        text = f"the sum of gradients {name} takes {format_seconds(spans[name])}"
        yield Binding(kind=BindingKind.SYNC, text=text)
