"""What one rank does in a step: its rows, its actions and its communications, from the plan alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..plan.order import Communication, Inside, Summed, Transfer, communications, share_of
from ..plan.placement import Place, holding
from ..plan.plan import Plan
from ..plan.rows import guest_row, has_guests, micro_batch_rows, replica_rows
from ..plan.schedule import Action, Work, row_actions
from ..plan.schedule import num_rows as rows_of


@dataclass(frozen=True, slots=True)
class Program:
    """What this rank does in a step on a batch of some number of rows."""

    rows: tuple[range, ...]
    """Rows of each micro-batch that it plays: its own; none where the batch is too short for it."""
    guests: frozenset[int]
    """Micro-batches of which it plays one row that is another's, since others need its experts."""
    actions: tuple[Action, ...]
    """Those with rows."""
    sequence: tuple[Communication, ...]
    """Its messages and reductions in the total order, without the commit word."""

    @classmethod
    def of(cls, plan: Plan, places: Sequence[Place], num_rows: int, summed: Summed) -> "Program":
        """For a batch of ``num_rows`` rows; ``places`` are those of one rank."""
        place = places[0]  # all stages of a rank split a micro-batch alike
        pipeline, stage, _ = holding(plan, place)
        micro_batches = micro_batch_rows(plan, num_rows)[place.pipeline]
        rows = [replica_rows(stage, span)[place.replica] for span in micro_batches]
        shared = has_guests(plan, pipeline, stage)
        guests = frozenset(m for m, span in enumerate(micro_batches) if shared and span and not rows[m])
        for m in guests:
            rows[m] = guest_row(micro_batches[m])
        actions = row_actions(
            plan.schedule,
            place.stage,
            rows_of(plan.schedule, pipeline),
            len(pipeline.stages),
            pipeline.micro_batches,
        )
        *order, _ = communications(plan, num_rows, summed)
        played = tuple(a for a in actions if rows[a.micro_batch])
        return cls(tuple(rows), guests, played, share_of(place.rank, order))

    def forwards(self) -> "Program":
        """Its forwards and what they exchange, for an evaluation."""
        return replace(
            self,
            actions=tuple(action for action in self.actions if action.work is Work.FORWARD),
            sequence=tuple(item for item in self.sequence if _is_forward(item)),
        )


def _is_forward(item: Communication) -> bool:
    match item:
        case Transfer(source=action) | Inside(action=action):
            return action.work is Work.FORWARD
        case _:
            return False
