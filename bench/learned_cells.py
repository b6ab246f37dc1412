"""The planner as it ships on one problem: seconds, replanning, a long refinement, the best peer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.plan import Plan
from bench.learned_curves import priced
from bench.learned_problems import Problem, one_node_less, one_node_more, sort_of
from bench.learned_records import MIDDLE_DEVICES, Planned, ratio
from bench.learned_search import Searched, searched
from planner.peers import PEERS
from planner.request import Request
from planner.search import Found, Source

PLANNING_S, LONGER_PLANNING_S = 0.4, 2.7
"""Budget of planning up to ``MIDDLE_DEVICES``, and beyond: what is wanted is 0.5 s and 3 s, all in all."""

DEFAULT_S = 5.0
"""Budget of `arachne plan` and `planner.find_plan` where none is given; the policy comes after all moves."""

REPLANNING_S = 0.14
"""Budget after one node's change; wanted is 0.2 s, all in all."""

LEAST_LEFT_S = 0.2
"""With less left of its budget a refinement ends: no search starts in so short a time."""


Peer = tuple[float, str]
"""Samples a second, and its name."""

NO_PEER: Peer = (0.0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured of a problem."""

    seeds: tuple[int, ...]
    refined_s: float
    """CPU time of the long refinement, 0 for none."""
    peers_s: float
    """CPU time of each peer, 0 for none."""
    default_s: float = DEFAULT_S
    """Budget of the second kind of run, which asks the peers too, as it ships; 0 for none."""
    replans: bool = True


def planned(
    problem: Problem, effort: Effort, every_source: Sequence[Source], known_peer: Peer | None = None
) -> Planned:
    """Everything of one problem; ``every_source``: of the refinement. ``known_peer``: the best one's."""
    request = problem.request()
    budget_s = PLANNING_S if len(request.cluster.devices) <= MIDDLE_DEVICES else LONGER_PLANNING_S
    runs = [searched(problem.request(), budget_s=budget_s, sources=None, seed=seed) for seed in effort.seeds]
    defaults = [
        searched(problem.request(), budget_s=effort.default_s, sources=None, seed=seed, peers=PEERS)
        for seed in (effort.seeds if effort.default_s else ())
    ]
    replans = list(_replans(problem, runs[0].found, budget_s)) if effort.replans else []
    refinement = refined(problem.request(), effort.refined_s, every_source)
    peer = known_peer or (_best_peer(request, effort.peers_s) if effort.peers_s else NO_PEER)
    return Planned(
        problem=problem.name,
        sort=sort_of(request),
        cpu_s=tuple(run.cpu_s for run in runs),
        samples_per_s=tuple(run.samples_per_s for run in runs),
        default_cpu_s=tuple(run.cpu_s for run in defaults),
        default_samples_per_s=tuple(run.samples_per_s for run in defaults),
        replan_cpu_s=tuple(seconds for seconds, _ in replans),
        replan_share=tuple(share for _, share in replans),
        refined_s=refinement.cpu_s,
        refined=refinement.samples_per_s,
        peer=peer[1],
        peer_samples_per_s=peer[0],
    )


def _replans(problem: Problem, found: Found | None, budget_s: float) -> Iterator[tuple[float, float]]:
    """(CPU seconds, part of what planning anew reaches) after a node has gone, and after one has come."""
    for changed in (one_node_less(problem.request()), one_node_more(problem.request())):
        if changed is not None and found is not None:
            running = replace(changed, running=found.plan)
            again = searched(running, budget_s=REPLANNING_S, sources=None)
            anew = searched(replace(changed), budget_s=budget_s, sources=None)
            yield again.cpu_s, ratio(again.samples_per_s, anew.samples_per_s)


def refined(request: Request, budget_s: float, sources: Sequence[Source]) -> Searched:
    """Searches from new seeds, and from the best plan so far, until the time is over."""
    best, spent_s, seed = Searched(0.0, None), 0.0, 0
    while spent_s < budget_s - LEAST_LEFT_S:
        known = (Known(best.found.plan),) if best.found else ()
        run = searched(request, budget_s=budget_s - spent_s, sources=sources, seed=seed, peers=known)
        spent_s, seed = spent_s + run.cpu_s, seed + 1
        best = max(best, run, key=lambda each: each.samples_per_s)
    return Searched(spent_s, best.found)


@dataclass(frozen=True, slots=True)
class Known:
    """A strategy that proposes a plan found before."""

    plan: Plan
    name: str = "known"

    def propose(self, request: Request, *, budget_s: float = 0.0) -> Plan:
        return self.plan


def _best_peer(request: Request, budget_s: float) -> Peer:
    """Samples a second and the name; ``NO_PEER`` where no peer has a plan."""
    found = []
    for peer in PEERS:
        try:
            plan = peer.propose(request, budget_s=budget_s)
        except NotMeasuredError:
            continue  # what it would try reaches beyond the profile: it has no plan
        if plan is not None:
            found.append((priced(plan, request), peer.name))
    return max(found, default=NO_PEER)
