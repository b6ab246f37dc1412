"""What one rank does in a step: its rows, its actions and its communications, from the plan alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan.order import Communication, Summed, Time, Transfer, start_times, timed_communications
from ..plan.placement import Place, holding
from ..plan.plan import Plan
from ..plan.rows import in_lockstep, micro_batch_rows, replica_rows
from ..plan.schedule import Action, Work, num_rows, row_actions


@dataclass(frozen=True, slots=True)
class Program:
    """What this rank does in a step on a batch of some number of rows."""

    rows: tuple[range, ...]
    """Its own rows of each micro-batch; none where the batch is too short for it."""
    read: tuple[range, ...]
    """Rows of each micro-batch whose samples it reads: its own. Where it plays without any, one of another
    replica, which has the form of its samples; none where it does not play."""
    actions: tuple[Action, ...]
    """Those with rows, and those that must be played in lockstep with replicas that have some."""
    first: int | None
    """The first micro-batch with rows, if there is one; None too where replicas in lockstep differ in it."""
    last: Mapping[int, int]
    """The last micro-batch that it plays, by stage."""
    sequence: tuple[Communication, ...]
    """Its messages and reductions in the total order, without the commit word."""
    ready: tuple[Time, ...]
    """When each of ``sequence`` can run, in the simulation that orders them; ascending."""
    starts: Mapping[Action, Time]
    """When each of ``actions`` starts there."""

    @classmethod
    def of(cls, plan: Plan, places: Sequence[Place], num_samples: int, summed: Summed) -> "Program":
        """For a batch of ``num_samples`` rows; ``places`` are those of one rank."""
        place = places[0]  # all stages of a rank split a micro-batch alike
        pipeline, stage, _ = holding(plan, place)
        spans = micro_batch_rows(plan, num_samples)[place.pipeline]
        by_replica = [replica_rows(stage, span) for span in spans]
        rows = tuple(mine[place.replica] for mine in by_replica)
        always = in_lockstep(pipeline, place.stage)
        read = tuple(mine or (span[:1] if always else mine) for mine, span in zip(rows, spans, strict=True))
        all_actions = row_actions(
            plan.schedule,
            place.stage,
            num_rows(plan.schedule, pipeline),
            len(pipeline.stages),
            pipeline.micro_batches,
        )
        actions = tuple(action for action in all_actions if read[action.micro_batch])
        first = next((m for m, mine in enumerate(rows) if mine), None)
        if always and any(span and not all(mine) for span, mine in zip(spans, by_replica, strict=True)):
            first = None
        last = {action.stage: action.micro_batch for action in actions}
        timed = [
            item for item in timed_communications(plan, num_samples, summed) if place.rank in item[1].members
        ]
        starts = {action: start for (p, action), start in start_times(plan).items() if p == place.pipeline}
        return cls(
            rows, read, actions, first, last,
            sequence=tuple(item for _, item in timed),
            ready=tuple(time for time, _ in timed),
            starts={action: starts[action] for action in actions},
        )  # fmt: skip

    def forwards(self) -> "Program":
        """Its forwards and their messages, for an evaluation."""
        kept = [
            (time, item)
            for time, item in zip(self.ready, self.sequence, strict=True)
            if isinstance(item, Transfer) and item.source.work is Work.FORWARD
        ]
        return replace(
            self,
            actions=tuple(action for action in self.actions if action.work is Work.FORWARD),
            sequence=tuple(item for _, item in kept),
            ready=tuple(time for time, _ in kept),
        )
