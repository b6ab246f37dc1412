"""Lays a measured run beside the price of its plan: stages, reductions, the step, and why they differ."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from arachne_runtime.plan.document import Document
from arachne_runtime.plan.placement import Place, places
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import APART, WARM_UP_STEPS, Record, RecordKind
from arachne_runtime.plan.schedule import Action
from arachne_runtime.units import Seconds, format_seconds
from planner.cost.estimate import Span

from .recorded import read_recorded

STEP, REST = RecordKind.STEP.value, "rest"
UNTOLD = (RecordKind.MEMORY, RecordKind.COMMIT)
"""Kinds that are no pieces: the commit word is most of the rest, as a price has it."""


class Piece(Document, frozen=True, kw_only=True):
    """What one rank does of one sort in a step, say all forwards of its stage; seconds of a whole step."""

    rank: int
    device: str
    pipeline: int
    stage: int
    sort: str
    """``forward``, ``backward``, ``reduce 7:26``, ``update``, ``rest``."""
    count: int
    """How many a step: micro-batches for forward and backward."""
    compute_s: Seconds
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
        """Measured minus predicted."""
        return self.measured_s - (self.predicted_s or 0.0)

    def __str__(self) -> str:
        return f"{self.sort} on {self.device} (pipeline {self.pipeline}, stage {self.stage})"


class RunReport(Document, frozen=True, kw_only=True):
    """A run against its price."""

    steps: int
    """Steps that count, after the warm-up."""
    warm_up_steps: int
    measured_s: Seconds
    """Median of the steps' times."""
    predicted_s: Seconds | None
    error: float | None
    """(predicted - measured) / measured."""
    pieces: tuple[Piece, ...]
    because: str
    """The piece that explains most of the difference, in words."""
    faults: tuple[str, ...]
    """Lines of the records that could not be read."""
    other_plans: tuple[str, ...]
    """Digests of other plans whose records lie in the same folder."""
    earlier_runs: int
    """Runs of this plan in the same folder before the last one, which is the one reported."""


def report_run(
    plan: Plan,
    folder: Path,
    *,
    timeline: Mapping[str, Sequence[Span]] | None = None,
    predicted_s: Seconds | None = None,
    unpriced: str | None = None,
) -> RunReport:
    """Compare the records in ``folder`` with a price: its timeline by device, and its seconds of a step.

    Without ``predicted_s`` the plan's own prediction counts; ``unpriced`` says why there is no price. Raises
    what ``read_recorded`` raises.
    """
    recorded = read_recorded(folder, plan)
    if predicted_s is None and plan.predicted is not None:
        predicted_s = plan.predicted.iteration_s
    steps = sorted({record.step for record in recorded.records})
    warm_up = min(WARM_UP_STEPS, len(steps) - 1)
    counted = frozenset(steps[warm_up:])
    records = [record for record in recorded.records if record.step in counted]
    measured_s = _step_seconds(records)
    pieces = tuple(_apart(tuple(_pieces(plan, records, timeline))))
    return RunReport(
        steps=len(counted),
        warm_up_steps=warm_up,
        measured_s=measured_s,
        predicted_s=predicted_s,
        error=None if predicted_s is None or measured_s == 0 else (predicted_s - measured_s) / measured_s,
        pieces=pieces,
        because=unpriced or _because(pieces, measured_s, predicted_s),
        faults=recorded.faults,
        other_plans=recorded.other_plans,
        earlier_runs=recorded.earlier_runs,
    )


def _step_seconds(records: Sequence[Record]) -> Seconds:
    """Median over the steps of the mean over the ranks: all ranks meet in every step, so all have its length.

    Where no rank wrote whole steps, the last end of any piece.
    """
    whole: dict[int, list[Seconds]] = defaultdict(list)
    for record in records:
        if record.kind is RecordKind.STEP:
            whole[record.step].append(_spent(record))
    if whole:
        return statistics.median(map(statistics.fmean, whole.values()))
    last: dict[int, Seconds] = defaultdict(float)
    for record in records:
        last[record.step] = max(last[record.step], record.start_s + _spent(record))
    return statistics.median(last.values())


def _spent(record: Record) -> Seconds:
    return record.wait_s + record.compute_s + record.transfer_s


def _pieces(
    plan: Plan, records: Iterable[Record], timeline: Mapping[str, Sequence[Span]] | None
) -> Iterator[Piece]:
    by_rank = {place.rank: place for place in places(plan)}
    groups: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.rank in by_rank and record.kind not in UNTOLD:
            groups[record.rank, _sort(record.kind, record.name)].append(record)
    for (rank, sort), group in sorted(groups.items(), key=lambda item: item[0][0]):
        spans = (timeline or {}).get(by_rank[rank].device, ())
        if sort != STEP:
            yield _piece(by_rank[rank], sort, group, spans)
    yield from _rests(by_rank, groups, timeline or {})


def _piece(place: Place, sort: str, group: Sequence[Record], spans: Sequence[Span]) -> Piece:
    ours = [span for span in spans if _sort(span.kind, span.name) == sort]
    steps = len({record.step for record in group})
    return Piece(
        rank=place.rank,
        device=place.device,
        pipeline=place.pipeline,
        stage=place.stage,
        sort=sort,
        count=round(len(group) / steps),
        compute_s=_per_step(group, lambda r: r.compute_s),
        wait_s=_per_step(group, lambda r: r.wait_s),
        transfer_s=_per_step(group, lambda r: r.transfer_s),
        predicted_s=sum(span.end_s - span.start_s for span in ours) if ours else None,
    )


def _rests(
    by_rank: Mapping[int, Place],
    groups: Mapping[tuple[int, str], Sequence[Record]],
    timeline: Mapping[str, Sequence[Span]],
) -> Iterator[Piece]:
    """What a step holds beside its pieces: the commit word with the wait for all, reading rows, bookkeeping.

    The rank that all wait for waits least: its rest is work, what others have more is waiting.
    """
    rest: dict[int, Seconds] = {}
    for rank in by_rank:
        if (rank, STEP) in groups:
            told = [r for (of, _), group in groups.items() if of == rank for r in group if r.kind in APART]
            rest[rank] = max(0.0, _per_step(groups[rank, STEP], _spent) - _per_step(told, _spent))
    gaps = [gap for place in by_rank.values() if (gap := _gap(timeline.get(place.device, ()))) is not None]
    for rank, seconds in rest.items():
        place, work = by_rank[rank], min(rest.values())
        yield Piece(
            rank=rank,
            device=place.device,
            pipeline=place.pipeline,
            stage=place.stage,
            sort=REST,
            count=1,
            compute_s=work,
            wait_s=seconds - work,
            transfer_s=0.0,
            predicted_s=min(gaps, default=None),
        )


def _gap(spans: Sequence[Span]) -> Seconds | None:
    """What a price puts between a device's last action or reduction and its update."""
    ends = [span.end_s for span in spans if span.kind is not RecordKind.UPDATE]
    starts = [span.start_s for span in spans if span.kind is RecordKind.UPDATE]
    return starts[0] - max(ends) if ends and starts else None


def _sort(kind: RecordKind, name: str) -> str:
    """What records are put together: all forwards of a stage, all backwards, each reduction, the update."""
    if kind is RecordKind.ACTION:
        return Action.parse(name).work.name.lower()
    return f"{kind} {name}" if kind in (RecordKind.REDUCE, RecordKind.COLLECTIVE) else kind.value


def _per_step(group: Iterable[Record], seconds: Callable[[Record], Seconds]) -> Seconds:
    """Sum over a step, median over the steps: under a quota single actions are too short to judge."""
    total: dict[int, Seconds] = defaultdict(float)
    for record in group:
        total[record.step] += seconds(record)
    return statistics.median(total.values()) if total else 0.0


def _apart(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Reductions with their wait told from their work: the rank that comes last does not wait."""
    least: dict[str, Seconds] = {}
    for piece in pieces:
        if piece.sort.startswith("reduce "):
            least[piece.sort] = min(least.get(piece.sort, math.inf), piece.wait_s)
    for piece in pieces:
        work = least.get(piece.sort, 0.0)
        yield replace(piece, compute_s=piece.compute_s + work, wait_s=piece.wait_s - work)


def _because(pieces: Sequence[Piece], measured_s: Seconds, predicted_s: Seconds | None) -> str:
    if predicted_s is None:
        return "the plan holds no prediction; give the cluster, model and profile, or plan again"
    known = [piece for piece in pieces if piece.predicted_s is not None or piece.sort == REST]
    if not known:
        return "no timeline to compare with; give the cluster, model and profile that the plan was made from"
    gap_s = measured_s - predicted_s
    worst = max(known, key=lambda piece: piece.excess_s if gap_s > 0 else -piece.excess_s)
    predicted = format_seconds(worst.predicted_s or 0.0)
    return (
        f"{worst}: measured {format_seconds(worst.measured_s)} a step, predicted {predicted}: "
        f"{_signed(worst.excess_s)} of a difference of {_signed(gap_s)}"
    )


def _signed(seconds: Seconds) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"
