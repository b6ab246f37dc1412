"""What a reader wants to know of a price: the timeline, where each device's time goes, and what binds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.plan.schedule import stage_actions
from arachne_runtime.units import Seconds

from .actors import Seat, Seats
from .estimate import Breakdown, Detail, Span
from .simulate import COLUMN, Actor, Played, Stages, play
from .sync import Address, Reduction
from .tables import Tables


@dataclass(frozen=True, slots=True)
class Run:
    """One step of a plan, played."""

    seats: Seats
    stages: tuple[Stages, ...]
    played: tuple[Played, ...]
    reductions: list[Reduction]
    spans: list[tuple[Seconds, Seconds]]
    commit_s: Seconds
    """When the world's all-reduce is done."""
    update_s: list[list[list[Seconds]]]
    """By pipeline, row and replica."""
    iteration_s: Seconds
    rows: tuple[int, ...]
    """Sets of devices of each pipeline: its stages; fewer if interleaved."""


def explain(plan: Plan, run: Run, tables: Tables) -> Detail:
    """Timeline, breakdown and the sentence for a plan that was played."""
    timeline: dict[str, tuple[Span, ...]] = {}
    breakdown: dict[str, Breakdown] = {}
    busiest: tuple[float, Address] = (-1.0, (0, 0, 0))
    for p, seated in enumerate(run.seats):
        count, rows = plan.pipelines[p].micro_batches, run.rows[p]
        still = play(plan.schedule, count, _without_messages(plan, p, run, tables), rows)
        for row in range(rows):
            for r, seat in enumerate(seated[row]):
                places = [(p, s, r) for s in range(row, len(seated), rows)]
                spans = sorted(
                    (span for span in _spans(plan, places, run)), key=lambda span: (span.start_s, span.end_s)
                )
                parts = _parts(plan, places, run, still, tables)
                timeline.update(dict.fromkeys(seat.replica.devices, tuple(spans)))
                breakdown.update(dict.fromkeys(seat.replica.devices, parts))
                busiest = max(busiest, (parts.compute_s, places[0]), key=lambda found: found[0])
    return Detail(timeline, breakdown, _limits(plan, busiest[1], run, breakdown))


def _pure(plan: Plan, at: Address, seat: Seat, tables: Tables) -> tuple[Seconds, Seconds]:
    stage = plan.pipelines[at[0]].stages[at[1]]
    return tables.stage_seconds(
        *stage.layers, seat.node.device.name, seat.tp, seat.replica.share, stage.recompute
    )


def _without_messages(plan: Plan, p: int, run: Run, tables: Tables) -> Stages:
    """The same pipeline on a network that takes no time."""
    return tuple(
        tuple(
            _quiet(actor, _pure(plan, (p, s, r), run.seats[p][s][r], tables)) for r, actor in enumerate(stage)
        )
        for s, stage in enumerate(run.stages[p])
    )


def _quiet(actor: Actor, pure: tuple[Seconds, Seconds]) -> Actor:
    return replace(
        actor,
        forward_s=pure[0],
        backward_s=pure[1],
        from_before=tuple((j, 0.0) for j, _ in actor.from_before),
        from_behind=tuple((j, 0.0) for j, _ in actor.from_behind),
        forward_tail_s=0.0,
        backward_tail_s=0.0,
    )


def _parts(plan: Plan, places: list[Address], run: Run, still: Played, tables: Tables) -> Breakdown:
    compute = sum(
        plan.pipelines[p].micro_batches * sum(_pure(plan, (p, s, r), run.seats[p][s][r], tables))
        for p, s, r in places
    )
    p, s, r = places[0]
    ready, quiet = run.played[p].ready_s[s][r], still.ready_s[s][r]
    return Breakdown(
        compute_s=compute,
        bubble_s=max(0.0, quiet - compute),
        hop_s=ready - quiet,
        sync_s=run.commit_s - ready,
        update_s=run.iteration_s - run.commit_s,
    )


def _spans(plan: Plan, places: list[Address], run: Run) -> Iterator[Span]:
    """All that one device does, stage by stage."""
    for p, s, r in places:
        pipeline, actor = plan.pipelines[p], run.stages[p][s][r]
        depth, count = len(pipeline.stages), pipeline.micro_batches
        for action in stage_actions(plan.schedule, s, depth, count, num_rows=run.rows[p]):
            end = run.played[p].ends[s][r][COLUMN[action.work]][action.micro_batch]
            yield Span(RecordKind.ACTION, str(action), end - actor.seconds(action.work), end)
    for reduction, (start, end) in zip(run.reductions, run.spans, strict=True):
        if any(at in reduction.members for at in places):
            yield Span(RecordKind.REDUCE, reduction.name, start, end)
    p, row, r = places[0]
    yield Span(RecordKind.UPDATE, "update", run.commit_s, run.commit_s + run.update_s[p][row][r])


def _limits(plan: Plan, at: Address, run: Run, breakdown: dict[str, Breakdown]) -> str:
    p, s, r = at
    seat = run.seats[p][s][r]
    parts = breakdown[seat.replica.devices[0]]
    shares = {
        "compute": parts.compute_s,
        "bubbles": parts.bubble_s,
        "messages": parts.hop_s,
        "reductions and waiting for them": parts.sync_s,
        "optimizer and fixed costs": parts.update_s,
    }
    percent = {name: 100 * seconds / run.iteration_s for name, seconds in shares.items()}
    first, last = plan.pipelines[p].stages[s].layers
    blocks = f"block {first}" if last == first + 1 else f"blocks {first} to {last - 1}"
    where = f"stage {s} of pipeline {p} ({blocks} on {seat.node.device.name})"
    most = max(percent, key=lambda name: percent[name])
    rest = ", ".join(f"{name} {value:.0f} %" for name, value in percent.items() if name != most)
    if most == "compute":
        return f"{where} sets the pace: it computes {percent[most]:.0f} % of the iteration; {rest}"
    return f"{most} take {percent[most]:.0f} % of the iteration on the busiest devices, {where}; {rest}"
