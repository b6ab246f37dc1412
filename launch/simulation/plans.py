"""Plans for every set of devices that a trace brings, searched once for each count of alike nodes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as changed

from msgspec.structs import replace as stripped

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.plan import Plan
from planner.cost import Infeasible, price
from planner.request import Request
from planner.search import find_plan

from .places import Counts, counted, kinds_of, moved_to, node_by_node, nodes_of, with_nodes

EVALUATIONS = 24
"""Plans that a search prices, so that the same trace gives the same plans on any machine."""

RUNNERS = 2
"""Next best plans of each search that are kept too: what keeps most of the running one may be among them."""


@dataclass(frozen=True, slots=True)
class Known:
    """A plan on the first nodes of each kind."""

    plan: Plan
    samples_per_s: float
    counts: Counts
    """Nodes of each kind that it uses; others may be idle."""

    @property
    def step_s(self) -> float:
        """Seconds of an iteration."""
        return self.plan.global_batch / self.samples_per_s


@dataclass(slots=True)
class PlanTable:
    """What runs on which counts of nodes; more nodes never have a slower best plan."""

    request: Request
    """For all nodes of the cluster, an entry each."""
    evaluations: int = EVALUATIONS
    searches: int = 0
    _plans: dict[Plan, Known] = field(default_factory=dict)
    _asked: set[Counts] = field(default_factory=set)
    _fitting: dict[Counts, tuple[Known, ...]] = field(default_factory=dict)
    _kinds: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, evaluations: int = EVALUATIONS) -> "PlanTable":
        """Empty, for the nodes of a request."""
        single = changed(request, cluster=node_by_node(request.cluster), running=None)
        return cls(single, evaluations, _kinds=dict(kinds_of(single)))

    def counts(self, names: Iterable[str]) -> Counts:
        """How many of each kind these nodes are."""
        return counted(tuple(names), self._kinds)

    def alike(self, name: str) -> int:
        """The kind of a node."""
        return self._kinds[name]

    def add(self, plan: Plan) -> Known | None:
        """A plan that somebody gave, as one of those known; None where it does not fit."""
        found = price(plan, self.request)
        return None if isinstance(found, Infeasible) else self._keep(plan, found.samples_per_s)

    def search(self, counts: Counts) -> None:
        """Look for plans on so many nodes of each kind, once."""
        if counts in self._asked or not any(counts):
            return
        self._asked.add(counts)
        self.searches += 1
        here = changed(self.request, cluster=with_nodes(self.request.cluster, self._first(counts)))
        try:
            found = find_plan(here, evaluations=self.evaluations, peers=())
        except NoFeasiblePlanError:
            return
        self._keep(found.plan, found.estimate.samples_per_s)
        for runner in found.runners_up[:RUNNERS]:
            self._keep(runner.plan, runner.estimate.samples_per_s)

    def fitting(self, counts: Counts) -> tuple[Known, ...]:
        """Every known plan that so many nodes hold, fastest first; of equal ones that with fewer nodes."""
        if counts not in self._fitting:
            fits = (k for k in self._plans.values() if _within(k.counts, counts))
            self._fitting[counts] = tuple(sorted(fits, key=lambda k: (-k.samples_per_s, sum(k.counts))))
        return self._fitting[counts]

    def best_rate(self, counts: Counts) -> float:
        """Samples a second of the fastest; 0 where nothing fits."""
        fitting = self.fitting(counts)
        return fitting[0].samples_per_s if fitting else 0.0

    def on(self, known: Known, names: Iterable[str]) -> Plan:
        """The plan on nodes that are there, the first ones of each kind."""
        free: dict[int, list[str]] = {}
        for name in sorted(names, key=list(self._kinds).index):
            free.setdefault(self._kinds[name], []).append(name)
        taken = {name: free[self._kinds[name]].pop(0) for name in self._in_order(nodes_of(known.plan))}
        return moved_to(known.plan, taken)

    def _keep(self, plan: Plan, samples_per_s: float) -> Known:
        bare = stripped(plan, predicted=None, made_by=None)  # which also makes it a key
        known = Known(bare, samples_per_s, self.counts(nodes_of(plan)))
        self._fitting.clear()
        return self._plans.setdefault(bare, known)

    def _first(self, counts: Counts) -> Iterator[str]:
        left = list(counts)
        for name, kind in self._kinds.items():
            if left[kind]:
                left[kind] -= 1
                yield name

    def _in_order(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [name for name in self._kinds if name in wanted]


def _within(counts: Counts, others: Counts) -> bool:
    return all(a <= b for a, b in zip(counts, others, strict=True))
