"""Rules of a plan by itself.

Each rule is one function that yields problems. Where a fault breaks two rules, the one that names it speaks
and the other stays silent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from ...errors import Problem
from ..cluster import node_of
from ..limits import MAX_MICRO_BATCHES
from ..plan import Plan, ScheduleKind
from ..schedule import num_rows
from ..walk import child, said
from . import visit
from .bounds import above_zero, at_least, not_negative

_MAX_ZERO = 3


def has_pipelines(plan: Plan) -> Iterator[Problem]:
    """A plan without pipelines trains nothing."""
    if not plan.pipelines:
        yield Problem("$.pipelines", "has no pipeline")


def pipelines_have_stages(plan: Plan) -> Iterator[Problem]:
    """Every pipeline has a stage."""
    for path, pipeline in visit.pipelines(plan):
        if not pipeline.stages:
            yield Problem(f"{path}.stages", "has no stage")


def stages_have_replicas(plan: Plan) -> Iterator[Problem]:
    """Every stage has a replica."""
    for path, _, stage in visit.stages(plan):
        if not stage.replicas:
            yield Problem(f"{path}.replicas", "has no replica")


def replicas_have_devices(plan: Plan) -> Iterator[Problem]:
    """Every replica has a device."""
    for path, replica in visit.replicas(plan):
        if not replica.devices:
            yield Problem(f"{path}.devices", "has no device")


def model_is_named(plan: Plan) -> Iterator[Problem]:
    """The model has a name."""
    if not plan.model.strip():
        yield Problem("$.model", "is empty; give the model's name")


def counts_are_positive(plan: Plan) -> Iterator[Problem]:
    """Samples, tokens and micro-batches are counted from 1."""
    counts = {"$.global_batch": plan.global_batch, "$.sequence": plan.sequence}
    for path, pipeline in visit.pipelines(plan):
        counts[f"{path}.micro_batches"] = pipeline.micro_batches
        counts[f"{path}.micro_batch"] = pipeline.micro_batch
    yield from at_least(1, counts)


def micro_batches_can_be_listed(plan: Plan) -> Iterator[Problem]:
    """A count with too many zeros is found here, before memory runs out."""
    total = sum(max(0, pipeline.micro_batches) for pipeline in plan.pipelines)
    if total > MAX_MICRO_BATCHES:
        message = f"hold {total} micro-batches; at most {MAX_MICRO_BATCHES} are supported: make them larger"
        yield Problem("$.pipelines", message)


def stages_hold_a_block(plan: Plan) -> Iterator[Problem]:
    """``layers`` is half-open, so its first number is below its second."""
    for path, _, stage in visit.stages(plan):
        start, stop = stage.layers
        if start >= stop:
            yield Problem(f"{path}.layers", f"holds no block: [{start}, {stop}] is half-open")


def first_stages_start_at_block_0(plan: Plan) -> Iterator[Problem]:
    """Every pipeline begins with the first block."""
    for path, pipeline in visit.pipelines(plan):
        if pipeline.stages and pipeline.stages[0].layers[0] != 0:
            start = pipeline.stages[0].layers[0]
            yield Problem(f"{path}.stages[0].layers", f"starts at block {start}, but a pipeline starts at 0")


def stages_are_contiguous(plan: Plan) -> Iterator[Problem]:
    """A stage starts where the one before it stops: no block twice, none left out."""
    for path, pipeline in visit.pipelines(plan):
        for s, (before, after) in enumerate(pairwise(pipeline.stages), start=1):
            stop, start = before.layers[1], after.layers[0]
            if start != stop:
                message = f"starts at block {start}, but the previous stage stops at {stop}"
                yield Problem(f"{path}.stages[{s}].layers", message)


def pipelines_stop_at_the_same_block(plan: Plan) -> Iterator[Problem]:
    """All pipelines train the same model. (With a model at hand, ``pipelines_cover_the_model`` says more.)"""
    stops = [
        (p, pipeline.stages[-1].layers[1]) for p, pipeline in enumerate(plan.pipelines) if pipeline.stages
    ]
    for p, stop in stops[1:]:
        first, expected = stops[0]
        if stop != expected:
            message = f"stops at block {stop}, but pipeline {first} stops at {expected}"
            yield Problem(visit.last_layers(plan, p), message)


def shares_are_positive(plan: Plan) -> Iterator[Problem]:
    """A replica without samples would idle: it has no place in a plan."""
    yield from at_least(1, {f"{path}.share": replica.share for path, replica in visit.replicas(plan)})


def shares_add_up(plan: Plan) -> Iterator[Problem]:
    """Each stage takes every sample of a micro-batch once."""
    for path, pipeline, stage in visit.stages(plan):
        total = sum(stage.shares)
        if stage.replicas and pipeline.micro_batch >= 1 and total != pipeline.micro_batch:
            message = f"shares add up to {total}, but micro_batch is {pipeline.micro_batch}"
            yield Problem(f"{path}.replicas", message)


def micro_batches_add_up(plan: Plan) -> Iterator[Problem]:
    """The pipelines together take the global batch, no more and no less."""
    counts = [n for p in plan.pipelines for n in (p.micro_batches, p.micro_batch)]
    total = sum(p.micro_batches * p.micro_batch for p in plan.pipelines)
    if counts and min(*counts, plan.global_batch) >= 1 and total != plan.global_batch:
        terms = " + ".join(f"{p.micro_batches} x {p.micro_batch}" for p in plan.pipelines[:8])
        more = " + ..." if len(plan.pipelines) > 8 else ""
        message = f"is {plan.global_batch}, but the micro-batches hold {terms}{more} = {total} samples"
        yield Problem("$.global_batch", message)


def devices_are_well_named(plan: Plan) -> Iterator[Problem]:
    """A device is called ``node:index``."""
    for path, device in visit.devices(plan):
        if not visit.is_device(device):
            yield Problem(path, f"{said(device)} is no device; a device is written node:index, like a-0:3")


def devices_are_used_once(plan: Plan) -> Iterator[Problem]:
    """A device belongs to one stage; interleaved, to several stages of one pipeline, once in each."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for path, device in visit.devices_of(stage, f"$.pipelines[{p}].stages[{s}]"):
                clash = next(
                    (place for place in seen[device] if _clashes(plan.schedule, place, (p, s))), None
                )
                if clash is None:
                    seen[device].append((p, s))
                else:
                    where = f"pipeline {clash[0]}, stage {clash[1]}"
                    yield Problem(path, f"{device} is already in {where}; a device belongs to one stage")


def interleaved_stages_take_turns(plan: Plan) -> Iterator[Problem]:
    """An interleaved pipeline deals its stages out to its sets of devices in turns, as many to each."""
    if plan.schedule is not ScheduleKind.INTERLEAVED:
        return
    for p, pipeline in enumerate(plan.pipelines):
        stages, rows = pipeline.stages, num_rows(plan.schedule, pipeline)
        for s, stage in enumerate(stages):
            path = f"$.pipelines[{p}].stages[{s}].replicas"
            other = next((t for t in range(s) if set(stages[t].devices) & set(stage.devices)), None)
            if s >= rows and stage.replicas != stages[s % rows].replicas:
                yield Problem(path, f"must be those of stage {s % rows}: {rows} sets of devices take turns")
            elif s < rows and other is not None:
                yield Problem(path, f"has some devices of stage {other}, not all; a set holds whole stages")
        if stages and len(stages) % rows:
            message = f"{len(stages)} stages do not divide among {rows} sets of devices"
            yield Problem(f"$.pipelines[{p}].stages", message)


def tensor_groups_stay_in_a_node(plan: Plan) -> Iterator[Problem]:
    """The devices of a replica are its tensor-parallel group, which needs the node's fast links."""
    for path, replica in visit.replicas(plan):
        first = next(iter(replica.devices), None)
        away = next((d for d in replica.devices if node_of(d) != node_of(replica.devices[0])), None)
        if away is not None and all(map(visit.is_device, replica.devices)):
            yield Problem(path, f"devices {first} and {away} are in different nodes")


def zero_is_0_to_3(plan: Plan) -> Iterator[Problem]:
    """ZeRO has stages 0 to 3."""
    for path, _, stage in visit.stages(plan):
        if not 0 <= stage.zero <= _MAX_ZERO:
            yield Problem(f"{path}.zero", f"must be 0, 1, 2 or 3, is {stage.zero}")


def expert_degrees_are_positive(plan: Plan) -> Iterator[Problem]:
    """Degrees of parallelism are counted from 1."""
    for path, _, stage in visit.stages(plan):
        degrees = {"expert_parallel": stage.expert_parallel, "expert_tensor": stage.expert_tensor}
        yield from at_least(1, {f"{path}.{name}": degree for name, degree in degrees.items()})


def expert_degrees_divide_the_stage(plan: Plan) -> Iterator[Problem]:
    """Expert groups tile the devices of their stage."""
    for path, _, stage in visit.stages(plan):
        group, count = stage.expert_parallel * stage.expert_tensor, len(stage.devices)
        if min(stage.expert_parallel, stage.expert_tensor) >= 1 and count and count % group:
            message = f"expert_parallel x expert_tensor = {group} does not divide the stage's {count} devices"
            yield Problem(f"{path}.expert_parallel", message)


def expert_tensor_groups_stay_in_a_node(plan: Plan) -> Iterator[Problem]:
    """Expert tensor parallelism varies fastest over (replica, TP rank), and needs the node's fast links."""
    for path, _, stage in visit.stages(plan):
        devices, size = stage.devices, stage.expert_tensor
        if size < 2 or len(devices) % size or not all(map(visit.is_device, devices)):
            continue
        for start in range(0, len(devices), size):
            group = devices[start : start + size]
            away = next((d for d in group if node_of(d) != node_of(group[0])), None)
            if away is not None:
                message = f"puts devices {group[0]} and {away} of different nodes in one group"
                yield Problem(f"{path}.expert_tensor", message)


def prediction_is_positive(plan: Plan) -> Iterator[Problem]:
    """Nothing takes no time."""
    if (told := plan.predicted) is not None:
        rates = {"iteration_s": told.iteration_s, "samples_per_s": told.samples_per_s}
        yield from above_zero({f"$.predicted.{name}": value for name, value in rates.items()})
        yield from not_negative({_peak(device): count for device, count in told.peak_bytes.items()})


def predicted_devices_are_in_the_plan(plan: Plan) -> Iterator[Problem]:
    """Memory is predicted for devices that the plan uses."""
    used = set(plan.devices)
    for device in plan.predicted.peak_bytes if plan.predicted is not None else ():
        if device not in used:
            yield Problem(_peak(device), f"the plan does not use {device}")


PLAN_RULES: tuple[Callable[[Plan], Iterator[Problem]], ...] = (
    has_pipelines,
    pipelines_have_stages,
    stages_have_replicas,
    replicas_have_devices,
    model_is_named,
    counts_are_positive,
    micro_batches_can_be_listed,
    stages_hold_a_block,
    first_stages_start_at_block_0,
    stages_are_contiguous,
    shares_are_positive,
    shares_add_up,
    micro_batches_add_up,
    devices_are_well_named,
    devices_are_used_once,
    interleaved_stages_take_turns,
    tensor_groups_stay_in_a_node,
    zero_is_0_to_3,
    expert_degrees_are_positive,
    expert_degrees_divide_the_stage,
    expert_tensor_groups_stay_in_a_node,
    prediction_is_positive,
    predicted_devices_are_in_the_plan,
)


def _peak(device: str) -> str:
    return child("$.predicted.peak_bytes", device)


def _clashes(schedule: ScheduleKind, a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether a device may not be in both places, each (pipeline, stage)."""
    return schedule is not ScheduleKind.INTERLEAVED or a[0] != b[0] or a[1] == b[1]
