"""A search within a budget of CPU time: what it took, and the plan, if there is one."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from planner import find_plan
from planner.peers import Strategy
from planner.request import Request
from planner.search import Found, Source, Step
from planner.search import find_plan as search_alone


@dataclass(frozen=True, slots=True)
class Searched:
    """The end of a search."""

    cpu_s: float
    found: Found | None

    @property
    def samples_per_s(self) -> float:
        """0 where no plan was found in so short a time."""
        return self.found.estimate.samples_per_s if self.found else 0.0


def searched(
    request: Request,
    *,
    budget_s: float,
    sources: Sequence[Source] | None,
    learned: bool = False,
    seed: int = 0,
    peers: Sequence[Strategy] = (),
    steps: Collection[Step] = tuple(Step),
) -> Searched:
    """``sources``: None for the search as it ships; or, if ``learned``, with the policy from the start.

    CPU time of the whole process, so that a library's other threads count.
    """
    start = time.process_time()
    found = None
    with suppress(NoFeasiblePlanError, NotMeasuredError):
        found = find_plan(
            request,
            seed=seed,
            time_budget_s=budget_s,
            peers=peers,
            sources=sources,
            learned=learned,
            clock=time.process_time,
            steps=steps,
        )
    return Searched(time.process_time() - start, found)


def throughput_within(
    request: Request, budget_s: float, *, later: Sequence[Source], clock: Callable[[], float]
) -> float:
    """Samples a second of the best plan of the usual sources, then of ``later``; 0 where there is none."""
    with suppress(NoFeasiblePlanError, NotMeasuredError):
        found = search_alone(request, time_budget_s=budget_s, peers=(), later=later, clock=clock)
        return found.estimate.samples_per_s
    return 0.0
