"""What a reader wants to know of a price: the timeline, where each device's time goes, and what binds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.records import RecordKind
from arachne_runtime.plan.schedule import Work, stage_actions
from arachne_runtime.units import Seconds

from .actors import Seat, Seats
from .estimate import Breakdown, Detail, Span
from .simulate import Actor, Played, Stages, play
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
    iteration_s: Seconds


def explain(plan: Plan, run: Run, tables: Tables) -> Detail:
    """Timeline, breakdown and the sentence for a plan that was played."""
    timeline: dict[str, tuple[Span, ...]] = {}
    breakdown: dict[str, Breakdown] = {}
    busiest: tuple[float, Address] = (-1.0, (0, 0, 0))
    for p, seated in enumerate(run.seats):
        still = play(plan.schedule, plan.pipelines[p].micro_batches, _without_messages(plan, p, run, tables))
        for s, stage in enumerate(seated):
            for r, seat in enumerate(stage):
                at = (p, s, r)
                spans = tuple(_spans(plan, at, run))
                parts = _parts(plan, at, run, still, tables)
                timeline.update(dict.fromkeys(seat.replica.devices, spans))
                breakdown.update(dict.fromkeys(seat.replica.devices, parts))
                busiest = max(busiest, (parts.compute_s, at), key=lambda found: found[0])
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


def _parts(plan: Plan, at: Address, run: Run, still: Played, tables: Tables) -> Breakdown:
    p, s, r = at
    compute = plan.pipelines[p].micro_batches * sum(_pure(plan, at, run.seats[p][s][r], tables))
    ready, quiet = run.played[p].ready_s[s][r], still.ready_s[s][r]
    return Breakdown(
        compute_s=compute,
        bubble_s=max(0.0, quiet - compute),
        hop_s=ready - quiet,
        sync_s=run.commit_s - ready,
        update_s=run.iteration_s - run.commit_s,
    )


def _spans(plan: Plan, at: Address, run: Run) -> Iterator[Span]:
    p, s, r = at
    pipeline, actor = plan.pipelines[p], run.stages[p][s][r]
    forwards, backwards = run.played[p].ends[s][r]
    for action in stage_actions(plan.schedule, s, len(pipeline.stages), pipeline.micro_batches):
        forward = action.work is Work.FORWARD
        end = (forwards if forward else backwards)[action.micro_batch]
        took = actor.forward_s if forward else actor.backward_s
        yield Span(RecordKind.ACTION, str(action), end - took, end)
    for reduction, (start, end) in zip(run.reductions, run.spans, strict=True):
        if at in reduction.members:
            yield Span(RecordKind.REDUCE, reduction.name, start, end)
    yield Span(RecordKind.UPDATE, "update", run.commit_s, run.commit_s + run.update_s[p][s][r])


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
    where = f"stage {s} of pipeline {p} (blocks {first} to {last - 1} on {seat.node.device.name})"
    most = max(percent, key=lambda name: percent[name])
    rest = ", ".join(f"{name} {value:.0f} %" for name, value in percent.items() if name != most)
    if most == "compute":
        return f"{where} sets the pace: it computes {percent[most]:.0f} % of the iteration; {rest}"
    return f"{most} take {percent[most]:.0f} % of the iteration on the busiest devices, {where}; {rest}"
