"""A plan as text for people: one fact a line, no column that a neighbour can move, so it diffs well.

What is alike is said once: pipelines that differ in their devices' names only, and long runs of replicas.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from ..units import format_bytes, format_seconds, significant
from .alike import Alike, alike, numbers, short
from .cluster import Cluster
from .plan import Plan, Replica, Stage

_DEVICE_WIDTH = 12
_MOST_REPLICAS = 4
"""Alike neighbours in a stage that get a line each; more are one line."""
_MADE_OF = ("cluster", "model", "profile")


def describe(plan: Plan, cluster: Cluster | None = None) -> str:
    """Pipelines, stages, replicas, shares and what was predicted; device types where ``cluster`` is given."""
    lines = [*_head(plan, cluster)]
    for group in alike(plan, cluster):
        lines += ["", *_group(plan, group, cluster)]
    return "\n".join(lines)


def _head(plan: Plan, cluster: Cluster | None) -> Iterator[str]:
    yield f"plan of {plan.model}"
    yield f"  global batch  {_count(plan.global_batch, 'sample')} of {_count(plan.sequence, 'token')}"
    yield f"  schedule      {plan.schedule}"
    yield f"  blocks        {plan.num_blocks}"
    yield f"  devices       {_devices(plan, cluster)}"
    if plan.predicted is not None:
        seconds, rate = format_seconds(plan.predicted.iteration_s), plan.predicted.samples_per_s
        yield f"  predicted     {seconds} an iteration, {significant(rate, 4)} samples/s"
    if plan.made_by is not None:
        made = plan.made_by
        yield f"  made by       {made.solver} {made.version}, seed {made.seed}"
        for name in _MADE_OF:
            yield f"    {name:<11} {getattr(made, name)}"


def _devices(plan: Plan, cluster: Cluster | None) -> str:
    if cluster is None:
        return f"{len(plan.devices)}"
    used = set(plan.devices)
    unused = _types([device for device in cluster.devices if device not in used], cluster)
    return f"{len(used)} ({_types(plan.devices, cluster)})" + (f"; not used: {unused}" if unused else "")


def _types(devices: Iterable[str], cluster: Cluster) -> str:
    types = Counter(cluster.device_type(device) for device in devices)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(types.items()))


def _group(plan: Plan, group: Alike, cluster: Cluster | None) -> Iterator[str]:
    pipeline, count = group.first, len(group.pipelines)
    micro_batches = _count(pipeline.micro_batches, "micro-batch", "micro-batches")
    work = f"{micro_batches} of {_count(pipeline.micro_batch, 'sample')}"
    if count == 1:
        yield f"pipeline {group.pipelines[0]}: {work}"
    else:
        yield f"{count} × pipeline ({numbers(group.pipelines)}): {work} each"
    for s, stage in enumerate(pipeline.stages):
        yield f"  stage {s}: {', '.join(_stage_facts(stage))}"
        for run in _runs(plan, stage, cluster, one_by_one=count == 1):
            yield f"    {run}"
    if count > 1:
        yield "  devices, stage by stage"
        for p in group.pipelines:
            yield f"    {p}: {' | '.join(short(stage.devices) for stage in plan.pipelines[p].stages)}"


def _runs(plan: Plan, stage: Stage, cluster: Cluster | None, *, one_by_one: bool) -> Iterator[str]:
    """Replicas, neighbours that are alike as one line; without names where they stand elsewhere."""
    for facts, run in groupby(stage.replicas, key=lambda r: tuple(_replica_facts(plan, r, cluster))):
        replicas = list(run)
        if one_by_one and len(replicas) <= _MOST_REPLICAS:
            for replica in replicas:
                yield "  ".join((" ".join(replica.devices).ljust(_DEVICE_WIDTH), *facts))
            continue
        devices = short(d for replica in replicas for d in replica.devices) if one_by_one else ""
        yield f"{len(replicas)} × {'  '.join((*facts, devices))}".rstrip()


def _stage_facts(stage: Stage) -> Iterator[str]:
    start, stop = stage.layers
    yield f"blocks {start} to {stop - 1}" if stop - start > 1 else f"block {start}"
    if stage.recompute:
        yield "recompute"
    if stage.zero:
        yield f"ZeRO {stage.zero}"
    if stage.expert_parallel > 1:
        yield f"EP {stage.expert_parallel}"
    if stage.expert_tensor > 1:
        yield f"ETP {stage.expert_tensor}"


def _replica_facts(plan: Plan, replica: Replica, cluster: Cluster | None) -> Iterator[str]:
    if cluster is not None:
        yield cluster.device_type(replica.devices[0])
    if len(replica.devices) > 1:
        yield f"TP {len(replica.devices)}"
    yield _count(replica.share, "sample")
    peaks = plan.predicted.peak_bytes if plan.predicted is not None else {}
    known = [peaks[device] for device in replica.devices if device in peaks]
    if known:
        yield f"peak {format_bytes(max(known))}"


def _count(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
