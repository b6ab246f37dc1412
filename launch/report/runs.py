"""Lays a measured run beside the price of its plan: stages, reductions, the step, and why they differ."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.placement import Place, places
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import Record, RecordKind
from arachne_runtime.plan.schedule import Action
from arachne_runtime.units import Seconds, format_seconds
from planner.cost.estimate import Span

from .recorded import Recorded, read_recorded

WARM_UP_STEPS = 2
"""The first steps make connections and fill caches; they are left out where more follow."""


class Piece(Document, frozen=True, kw_only=True):
    """What one rank does of one sort in a step, say all forwards of its stage; seconds of a whole step."""

    rank: int
    device: str
    pipeline: int
    stage: int
    sort: str
    """``forward``, ``backward``, ``reduce 7:26``, ``update``."""
    count: int
    """How many a step: micro-batches for forward and backward."""
    compute_s: Seconds
    """Measured work; for a reduction, all of it."""
    wait_s: Seconds
    transfer_s: Seconds
    predicted_s: Seconds | None
    """What the price takes for the work; None where it knows nothing of it."""

    @property
    def measured_s(self) -> Seconds:
        """Work and sending, without waiting for others."""
        return self.compute_s + self.transfer_s

    @property
    def excess_s(self) -> Seconds:
        """Measured minus predicted; 0 without a prediction."""
        return 0.0 if self.predicted_s is None else self.measured_s - self.predicted_s

    def __str__(self) -> str:
        return f"{self.sort} on {self.device} (pipeline {self.pipeline}, stage {self.stage})"


class RunReport(Document, frozen=True, kw_only=True):
    """A run against its price."""

    steps: int
    """Steps that count, after the warm-up."""
    warm_up_steps: int
    measured_s: Seconds
    """Median of the steps' times; a step is as long as its slowest rank's."""
    predicted_s: Seconds | None
    error: float | None
    """(predicted - measured) / measured."""
    pieces: tuple[Piece, ...]
    because: str
    """The piece that explains most of the difference, in words."""
    faults: tuple[str, ...]
    """Lines of the records that could not be read."""
    other_plans: tuple[str, ...]


def report_run(
    plan: Plan,
    folder: Path,
    *,
    timeline: Mapping[str, Sequence[Span]] | None = None,
    predicted_s: Seconds | None = None,
) -> RunReport:
    """Compare the records in ``folder`` with a price: its timeline by device, and its seconds of a step.

    Without ``predicted_s`` the plan's own prediction counts. Raises what ``read_recorded`` raises.
    """
    recorded = read_recorded(folder, plan)
    if predicted_s is None and plan.predicted is not None:
        predicted_s = plan.predicted.iteration_s
    steps = sorted({record.step for record in recorded.records})
    warm_up = min(WARM_UP_STEPS, len(steps) - 1)
    counted = frozenset(steps[warm_up:])
    records = [record for record in recorded.records if record.step in counted]
    measured_s = _step_seconds(records)
    pieces = tuple(_pieces(plan, records, timeline))
    return RunReport(
        steps=len(counted),
        warm_up_steps=warm_up,
        measured_s=measured_s,
        predicted_s=predicted_s,
        error=None if predicted_s is None or measured_s == 0 else (predicted_s - measured_s) / measured_s,
        pieces=pieces,
        because=_because(pieces, measured_s, predicted_s),
        faults=recorded.faults,
        other_plans=recorded.other_plans,
    )


def _step_seconds(records: Iterable[Record]) -> Seconds:
    """Median over the steps of the slowest rank's time, from the last end of any piece."""
    longest: dict[int, Seconds] = defaultdict(float)
    for record in records:
        longest[record.step] = max(longest[record.step], record.start_s + _spent(record))
    return statistics.median(longest.values())


def _spent(record: Record) -> Seconds:
    return record.wait_s + record.compute_s + record.transfer_s


def _pieces(
    plan: Plan, records: Iterable[Record], timeline: Mapping[str, Sequence[Span]] | None
) -> Iterable[Piece]:
    by_rank = {place.rank: place for place in places(plan)}
    groups: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        sort = _sort(record.kind, record.name)
        if sort is not None and record.rank in by_rank:
            groups[record.rank, sort].append(record)
    for (rank, sort), group in sorted(groups.items(), key=lambda item: item[0][0]):
        place = by_rank[rank]
        spans = None if timeline is None else timeline.get(place.device, ())
        yield _piece(place, sort, group, spans)


def _piece(place: Place, sort: str, group: Sequence[Record], spans: Sequence[Span] | None) -> Piece:
    ours = [span for span in spans or () if _sort(span.kind, span.name) == sort]
    steps = len({record.step for record in group})
    return Piece(
        rank=place.rank,
        device=place.device,
        pipeline=place.pipeline,
        stage=place.stage,
        sort=sort,
        count=round(len(group) / steps),
        compute_s=_per_step(group, "compute_s"),
        wait_s=_per_step(group, "wait_s"),
        transfer_s=_per_step(group, "transfer_s"),
        predicted_s=sum(span.end_s - span.start_s for span in ours) if ours else None,
    )


def _sort(kind: RecordKind, name: str) -> str | None:
    """What records are put together: all forwards of a stage, all backwards, each reduction, the update."""
    if kind is RecordKind.ACTION:
        return Action.parse(name).work.name.lower()
    if kind is RecordKind.REDUCE:
        return f"reduce {name}"
    return "update" if kind is RecordKind.UPDATE else None


def _per_step(group: Iterable[Record], field: str) -> Seconds:
    """Sum over a step, median over the steps: under a quota single actions are too short to judge."""
    total: dict[int, Seconds] = defaultdict(float)
    for record in group:
        total[record.step] += getattr(record, field)
    return statistics.median(total.values())


def _because(pieces: Sequence[Piece], measured_s: Seconds, predicted_s: Seconds | None) -> str:
    if predicted_s is None:
        return "the plan holds no prediction; give the cluster, model and profile, or plan again"
    known = [piece for piece in pieces if piece.predicted_s is not None]
    if not known:
        return "no timeline to compare with; give the cluster, model and profile that the plan was made from"
    gap_s = measured_s - predicted_s
    worst = max(known, key=lambda piece: piece.excess_s if gap_s > 0 else -piece.excess_s)
    assert worst.predicted_s is not None
    return (
        f"{worst}: measured {format_seconds(worst.measured_s)} a step, predicted "
        f"{format_seconds(worst.predicted_s)}: {_signed(worst.excess_s)} of a difference of {_signed(gap_s)}"
    )


def _signed(seconds: Seconds) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


__all__ = ["Piece", "Recorded", "RunReport", "report_run"]
