"""When a plan ends, given when each stage is ready: reductions depend on cuts and devices only."""

from dataclasses import dataclass

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cost.actors import seats_of
from ..cost.sync import commit_seconds, reductions_of
from ..cost.tables import Tables


@dataclass(frozen=True, slots=True)
class End:
    """What follows the last backwards of some pipelines, whatever their shares and counts."""

    reductions: tuple[tuple[tuple[int, ...], Seconds], ...]
    """In order: the stages that take part, counted through all pipelines, and seconds."""
    after_s: Seconds
    """Commit, slowest optimizer and fixed seconds."""

    @classmethod
    def of(cls, plan: Plan, tables: Tables) -> "End":
        """As the price has it."""
        seats = seats_of(plan, tables)
        stages = [(p, s) for p, row in enumerate(seats) for s in range(len(row))]
        at = {stage: i for i, stage in enumerate(stages)}
        reductions = tuple(
            (tuple(dict.fromkeys(at[p, s] for p, s, _ in r.members)), r.seconds)
            for r in reductions_of(plan, seats, tables)
        )
        updates = [
            tables.update_seconds(*plan.pipelines[p].stages[s].layers, seat.node.device.name, seat.tp)
            for p, s in stages
            for seat in seats[p][s]
        ]
        return cls(reductions, commit_seconds(seats, tables) + max(updates) + tables.profile.step_s)

    def seconds(self, ready_s: list[Seconds]) -> Seconds:
        """When all is done if each stage is ready then. It moves ``ready_s`` on.

        With each pipeline's times alone a lower bound: no stage is ready earlier in the plan than alone.
        """
        for members, seconds in self.reductions:
            end = seconds + max([ready_s[at] for at in members])
            for at in members:
                ready_s[at] = end
        return max(ready_s) + self.after_s
