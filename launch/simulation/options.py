"""Plans that a job could change to, with what the change costs: live, or by a restart from a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from enum import StrEnum

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds
from planner.request import Request
from planner.search.migrate import change_seconds
from planner.search.realign import realigned

from .costs import Costs
from .holders import holdings, state_bytes
from .places import with_nodes
from .plans import Known, PlanTable

MOST_PRICED = 8
"""The fastest plans of which the migration is worked out."""


class Way(StrEnum):
    """How a job goes from one plan to another."""

    LIVE = "live"
    """In the same processes; state moves from living holders."""
    RESTART = "restart"
    """All processes end and begin again from the newest checkpoint."""


class Source(StrEnum):
    """Where the state comes from."""

    HOLDERS = "living holders"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One plan on certain nodes."""

    known: Known
    plan: Plan
    standstill_s: Seconds
    source: Source


@dataclass(slots=True)
class Pricer:
    """Prices changes of one trace's jobs."""

    table: PlanTable
    costs: Costs
    _requests: dict[frozenset[str], Request]

    @classmethod
    def of(cls, table: PlanTable, costs: Costs) -> "Pricer":
        """For all nodes of a table."""
        return cls(table, costs, {})

    def options(
        self,
        candidates: tuple[Known, ...],
        nodes: frozenset[str],
        old: Plan | None,
        way: Way,
        source: Source,
        *,
        planned: bool,
    ) -> Iterator[Option]:
        """Of each candidate the placement that moves least; ``planned``: at a step's end, nobody is lost."""
        request = self._request(nodes)
        for known in candidates:
            plan = self.table.on(known, nodes)
            if old is not None and way is Way.LIVE:
                plan = realigned(plan, old, request)
            standstill_s = self._standstill_s(old, plan, request, way, source, planned=planned)
            yield Option(known=known, plan=plan, standstill_s=standstill_s, source=source)

    def _standstill_s(
        self, old: Plan | None, new: Plan, request: Request, way: Way, source: Source, *, planned: bool
    ) -> Seconds:
        costs, most_bytes = self.costs, holdings(new, self.table.request).most_bytes
        if source is Source.NOTHING:
            return costs.restart_s if way is Way.RESTART else costs.pause_s
        if way is Way.RESTART:
            save_s = costs.save_s(state_bytes(request) / len(new.devices)) if planned else 0.0
            return save_s + costs.restart_s + costs.load_s(most_bytes)
        if source is Source.CHECKPOINT:
            return costs.recover_s + costs.load_s(most_bytes)
        assert old is not None
        fixed_s = costs.pause_s if planned else costs.recover_s
        if source is Source.SNAPSHOT:
            fixed_s += costs.copy_s(most_bytes)
        return fixed_s + change_seconds(old, new, request)

    def _request(self, nodes: frozenset[str]) -> Request:
        if nodes not in self._requests:
            whole = self.table.request
            cluster = with_nodes(whole.cluster, nodes)
            self._requests[nodes] = changed(whole, cluster=cluster, migration_pause_s=0.0)
        return self._requests[nodes]
