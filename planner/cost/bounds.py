"""Cheap bounds of the price: a closed form for inner searches, and a lower bound that is proven.

Proof of the lower bound. Clocks are maxima of sums of non-negative terms (``simulate``), so every chain of
actions and messages in which each waits for the one before is a lower bound. A replica waits for at least one
replica of each neighbour stage, so a chain passes a stage in no less than its fastest replica and fastest
message. Neighbours wait for each other in both directions, so a chain can come back the way it went. Three
kinds of chains, for a replica r of stage s with forward f, backward b, M micro-batches and ``ahead`` forwards
before its first backward:

- *busy*: a micro-batch comes down to s; r computes all its M (f + b); its last gradient goes up to stage 0.
- *first backward*: a micro-batch goes down to the last stage and back to s; r still has its M b and the
  M - ahead forwards that the schedule puts behind its first backward; then up to stage 0.
- *last forward*: a micro-batch comes down to s; r does its M f and the M - ahead backwards that precede its
  last forward; then that micro-batch goes down to the last stage and up to stage 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from arachne_runtime.plan.plan import Plan, ScheduleKind
from arachne_runtime.units import Seconds

from .actors import actors_of, crossings, crowd_of, seats_of
from .memory import in_flight
from .simulate import Actor, Stages
from .sync import Reduction, commit_seconds, reductions_of

if TYPE_CHECKING:
    from ..request import Request


@dataclass(frozen=True, slots=True)
class Bracket:
    """Between these lies the time of a pipeline of one replica a stage, if messages took no time."""

    low_s: Seconds
    """Proven: some stage waits for one micro-batch to reach it and then does all of its own."""
    high_s: Seconds
    """1F1B: (M - 1) max t + sum t, too high by 2 to 3 % on average and 25 % at worst, in 40,000 random cases
    never too low (not proven). GPipe: forwards and backwards apart, which is proven."""


def bracket(
    kind: ScheduleKind, forward_s: Sequence[Seconds], backward_s: Sequence[Seconds], micro_batches: int
) -> Bracket:
    """The closed form of docs/cost-model.md, from the seconds of one micro-batch by stage."""
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    before = accumulate(both, initial=0.0)
    low = max(waited + micro_batches * t for waited, t in zip(before, both, strict=False))
    paced = max(forward_s) + max(backward_s) if kind is ScheduleKind.GPIPE else max(both)
    return Bracket(low, (micro_batches - 1) * paced + sum(both))


@dataclass(frozen=True, slots=True)
class _Passage:
    """Least seconds of one micro-batch through a stage, the message into it included."""

    down: Seconds
    up: Seconds


def pipeline_floors(kind: ScheduleKind, micro_batches: int, stages: Stages) -> list[Seconds]:
    """For each stage a lower bound of when its slowest replica is through with its last action."""
    depth = len(stages)
    passages = [_passage(stages, s) for s in range(depth)]
    down = list(accumulate((p.down for p in passages), initial=0.0))
    floors = []
    for s, stage in enumerate(stages):
        ahead = in_flight(kind, s, depth, micro_batches)
        below = sum(p.down + p.up for p in passages[s + 1 :])
        reach = down[s + 1] - min(a.forward_s for a in stage)
        floors.append(reach + max(_chains(a, micro_batches, ahead, below) for a in stage))
    return _carried_up(floors, passages, stages)


def _passage(stages: Stages, s: int) -> _Passage:
    stage = stages[s]
    into = min((hop for a in stage for _, hop in a.from_before), default=0.0)
    back = min((hop for a in stages[s - 1] for _, hop in a.from_behind), default=0.0) if s else 0.0
    return _Passage(into + min(a.forward_s for a in stage), back + min(a.backward_s for a in stage))


def _chains(replica: Actor, micro_batches: int, ahead: int, below: Seconds) -> Seconds:
    """The longest of the three chains, from the first micro-batch at the replica to its last action."""
    f, b, behind = replica.forward_s, replica.backward_s, micro_batches - ahead
    busy = micro_batches * (f + b)
    first_backward = f + below + micro_batches * b + behind * f
    last_forward = micro_batches * f + behind * b + below + b
    return max(busy, first_backward, last_forward)


def _carried_up(floors: list[Seconds], passages: list[_Passage], stages: Stages) -> list[Seconds]:
    """The last gradient of a stage still has to pass all stages before it."""
    for s in range(len(floors) - 2, -1, -1):
        back = passages[s + 1].up - min(a.backward_s for a in stages[s + 1])
        floors[s] = max(floors[s], floors[s + 1] + back + min(a.backward_s for a in stages[s]))
    return floors


def lower_bound(plan: Plan, request: "Request") -> Seconds:
    """No price of the plan is below this; memory is not looked at. Raises as ``price`` does."""
    tables = request.tables
    seats = seats_of(plan, tables)
    crossed = [crossings(p, s, tables) for p, s in zip(plan.pipelines, seats, strict=True)]
    crowd = crowd_of(crossed)
    reductions = reductions_of(plan, seats, tables)
    done = 0.0
    for p, (pipeline, seated) in enumerate(zip(plan.pipelines, seats, strict=True)):
        actors = actors_of(pipeline, seated, crossed[p], crowd, tables)
        for s, floor in enumerate(pipeline_floors(plan.schedule, pipeline.micro_batches, actors)):
            done = max(done, floor + _own_reductions(reductions, p, s))
    updates = (
        tables.update_seconds(*stage.layers, seat.node.device.name, seat.tp) / (len(row) if stage.zero else 1)
        for pipeline, rows in zip(plan.pipelines, seats, strict=True)
        for stage, row in zip(pipeline.stages, rows, strict=True)
        for seat in row
    )
    return done + commit_seconds(seats, tables) + max(updates) + tables.profile.step_s


def _own_reductions(reductions: Sequence[Reduction], pipeline: int, stage: int) -> Seconds:
    """A rank does its reductions one after the other."""
    return sum(r.seconds for r in reductions if (pipeline, stage, 0) in r.members)
