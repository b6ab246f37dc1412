"""What a run says of a profile: measured seconds, each beside the figures whose sum it should be."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from arachne_runtime.errors import NotMeasuredError, UsageError
from arachne_runtime.plan.placement import Place, holding, places
from arachne_runtime.plan.plan import Stage
from arachne_runtime.plan.records import Record, RecordKind
from arachne_runtime.plan.schedule import Action, Work
from arachne_runtime.units import Seconds

from ..cost.tables import Tables
from .run import Run

FLOOR = 0.02
"""Deviation of the log of a rank's median: the demonstration's plan, four times on a busy lab, gave stages
within 2 % of each other (docs/measuring.md)."""
STEP_SPREAD = 0.05
"""Deviation of the log of one step at least, as few steps say little of their own spread: the lab's own
speed drifts by 4 to 5 % within 40 s (docs/measuring.md)."""


class Part(StrEnum):
    """What of a block takes the seconds."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, order=True)
class Figure:
    """What one factor corrects: a part of a block kind on a device type at a TP degree."""

    kind: str
    device: str
    tp: int
    part: Part

    def __str__(self) -> str:
        tp = f" TP {self.tp}" if self.tp > 1 else ""
        return f"{self.part} of {self.kind} on {self.device}{tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds, and the figures of the profile that they are the sum of."""

    run: str
    rank: int
    device: str
    """Device type."""
    tp: int
    part: Part
    """Of the records; a backward that recomputes has forward figures too."""
    samples: int
    """0 for an update."""
    terms: Mapping[Figure, Seconds]
    fixed_s: Seconds
    """What the price adds that no factor corrects: collectives of a tensor-parallel group."""
    measured_s: Seconds
    """Of one micro-batch, or one update: the median over the steps."""
    deviation: float
    """Standard deviation of its log."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that one run says of blocks and updates."""

    rows: tuple[Observation, ...]
    notes: tuple[str, ...]


def observe(run: Run, tables: Tables) -> Observed:
    """Rows for each rank: forwards, backwards and updates. What cannot be read is named in a note."""
    groups, strangers = _grouped(run)
    rows: list[Observation] = []
    unpriced: dict[str, None] = {}
    for (place, part, samples), steps in groups.items():
        try:
            row = _row(run, tables, place, part, samples, steps)
        except NotMeasuredError as error:
            unpriced[str(error)] = None
            continue
        if row is None:
            stage = f"stage {place.stage} of pipeline {place.pipeline}"
            unpriced[f"{stage} holds more than its blocks' seconds (ZeRO, tiles of experts)"] = None
        elif row.measured_s > 0 and _predicted(row) > 0:
            rows.append(row)
    notes = [f"left out: {what}" for what in unpriced]
    if strangers:
        notes.append(f"left out: {strangers} records of ranks or stages that the plan does not have")
    if run.num_insane:
        notes.append(f"left out: {run.num_insane} records with times that no clock gives")
    return Observed(tuple(rows), tuple(f"{run.name}: {note}" for note in notes))


_Steps = dict[int, list[Seconds]]
"""Seconds of single actions by step."""


def _grouped(run: Run) -> tuple[dict[tuple[Place, Part, int], _Steps], int]:
    """Compute seconds by place, part and samples; how many records belong to no place."""
    found: dict[tuple[Place, Part, int], _Steps] = defaultdict(lambda: defaultdict(list))
    by_rank: dict[int, list[Place]] = defaultdict(list)
    for place in places(run.plan):
        by_rank[place.rank].append(place)
    strangers = 0
    halves: dict[tuple[Place, int, int, int], Seconds] = defaultdict(float)
    for record in run.counted:
        mine = by_rank.get(record.rank, [])
        if record.kind is RecordKind.UPDATE:
            if len(mine) == 1:  # an update of all stages of an interleaved rank is of none
                found[mine[0], Part.UPDATE, 0][record.step].append(record.compute_s)
            strangers += not mine
        elif record.kind is RecordKind.ACTION:
            action = _action(record)
            at = [place for place in mine if action is not None and place.stage == action.stage]
            if action is None or not at or record.samples < 1:
                strangers += 1
            elif action.work in (Work.INPUT, Work.WEIGHT):  # two halves of one backward
                halves[at[0], record.samples, record.step, action.micro_batch] += record.compute_s
            else:
                part = Part.FORWARD if action.work is Work.FORWARD else Part.BACKWARD
                found[at[0], part, record.samples][record.step].append(record.compute_s)
    for (place, samples, step, _), seconds in halves.items():
        found[place, Part.BACKWARD, samples][step].append(seconds)
    return found, strangers


def _action(record: Record) -> Action | None:
    try:
        return Action.parse(record.name)
    except UsageError:
        return None


def _row(
    run: Run, tables: Tables, place: Place, part: Part, samples: int, steps: _Steps
) -> Observation | None:
    """None where the price of the stage has more in it than its blocks."""
    _, stage, replica = holding(run.plan, place)
    if stage.zero or stage.expert_parallel * stage.expert_tensor > 1:
        return None
    device, tp = run.cluster.device_type(place.device), len(replica.devices)
    if part is Part.UPDATE:
        terms, fixed_s = update_terms(tables, stage.blocks, device, tp), 0.0
    else:
        terms, fixed_s = _block_terms(tables, stage, device, tp, part, samples)
    measured_s, deviation = _typical([statistics.fmean(seconds) for seconds in steps.values()])
    return Observation(
        run=run.name,
        rank=place.rank,
        device=device,
        tp=tp,
        part=part,
        samples=samples,
        terms=terms,
        fixed_s=fixed_s,
        measured_s=measured_s,
        deviation=deviation,
    )


def _block_terms(
    tables: Tables, stage: Stage, device: str, tp: int, part: Part, samples: int
) -> tuple[dict[Figure, Seconds], Seconds]:
    """The stage's seconds by figure, and what its tensor-parallel collectives add."""
    forward, backward = tables.stage_seconds(*stage.layers, device, tp, samples, stage.recompute)
    parts = {Part.FORWARD} if part is Part.FORWARD else {Part.BACKWARD}
    if part is Part.BACKWARD and stage.recompute:
        parts.add(Part.FORWARD)
    terms: dict[Figure, Seconds] = {}
    for kind, count in Counter(tables.model.blocks[b].kind for b in stage.blocks).items():
        cost = tables.profile.block(kind, device, tp, samples)
        for p in sorted(parts):
            terms[Figure(kind, device, tp, p)] = count * (
                cost.forward_s if p is Part.FORWARD else cost.backward_s
            )
    whole = forward if part is Part.FORWARD else backward
    fixed_s = whole - math.fsum(terms.values())
    return terms, fixed_s if fixed_s > 1e-9 * whole else 0.0


def update_terms(tables: Tables, blocks: Iterable[int], device: str, tp: int) -> dict[Figure, Seconds]:
    """Seconds of the optimizer by figure, as the price has them."""
    terms: dict[Figure, Seconds] = defaultdict(float)
    for b in blocks:
        kind = tables.model.blocks[b].kind
        terms[Figure(kind, device, tp, Part.UPDATE)] += tables.update_seconds(b, b + 1, device, tp)
    return dict(terms)


def _typical(steps: Sequence[Seconds]) -> tuple[Seconds, float]:
    """Median over the steps, and the deviation of its log.

    A step's mean over its micro-batches counts, since under a quota single actions are too short to judge;
    the median of n values with a deviation s has one of 1.25 s / sqrt(n).
    """
    middle = statistics.median(steps)
    if middle <= 0:
        return middle, math.inf
    spread = 1.4826 * statistics.median(abs(s - middle) for s in steps) / middle
    of_median = 1.2533**2 * (spread**2 + STEP_SPREAD**2) / len(steps)
    return middle, math.sqrt(FLOOR**2 + of_median)


def _predicted(row: Observation) -> Seconds:
    return row.fixed_s + math.fsum(row.terms.values())


def ran_shares(rows: Iterable[Observation]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Shares that ran, ascending, by device type and TP degree."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in rows:
        if row.part is not Part.UPDATE:
            found[row.device, row.tp].add(row.samples)
    return {key: tuple(sorted(shares)) for key, shares in found.items()}


def ran_figures(rows: Iterable[Observation]) -> Iterator[Figure]:
    """Every figure that some row holds, once."""
    yield from dict.fromkeys(figure for row in rows for figure in row.terms)
