"""The search as ``planner.find_plan``: the learned policy is asked once the enumeration has no more to give.

``planner.search`` does not know the policy, which is built on it.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from arachne_runtime.errors import InvalidFileError, PolicyMissingError, PolicyStaleError
from arachne_runtime.units import Seconds

from . import search
from .peers import PEERS, Strategy
from .request import Request
from .search import Enumeration, Found, Progress, Source, Step
from .search.sources import usual_sources

LEAST_LEARNED_S: Seconds = 1.0
"""A shorter search ends before its moves do, and so before the policy would be asked: it need not be read."""


def find_plan(
    request: Request,
    *,
    seed: int = 0,
    time_budget_s: Seconds = 5.0,
    evaluations: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    peers: Sequence[Strategy] = PEERS,
    sources: Sequence[Source] | None = None,
    learned: bool = False,
    clock: Callable[[], Seconds] = time.monotonic,
    steps: Collection[Step] = tuple(Step),
) -> Found:
    """``planner.search.find_plan``, with time left after the usual sources and all moves by the policy.

    ``learned``: the policy is asked beside the usual sources instead, which short searches do not gain from
    (docs/negative-results.md). Neither with ``sources`` nor, later, with ``evaluations``.
    """
    notes: tuple[str, ...] = ()
    later: tuple[Source, ...] = ()
    if learned and sources is None:
        sources, notes = with_policy(request)
    elif sources is None and evaluations is None and time_budget_s >= LEAST_LEARNED_S:
        later, notes = policy_alone()
    return search.find_plan(
        request,
        seed=seed,
        time_budget_s=time_budget_s,
        evaluations=evaluations,
        on_progress=on_progress,
        peers=peers,
        sources=sources,
        later=later,
        notes=notes,
        clock=clock,
        steps=steps,
    )


def with_policy(request: Request) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """The usual sources with the policy behind the enumeration, where it can be read; what has to be said."""
    usual = usual_sources(request)
    at = 1 + next(i for i, source in enumerate(usual) if isinstance(source, Enumeration))
    policy, notes = policy_alone()
    return (*usual[:at], *policy, *usual[at:]), notes


def policy_alone() -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """The policy where it can be read; what has to be said."""
    try:
        return (_learned(),), ()
    except (PolicyMissingError, PolicyStaleError, InvalidFileError) as error:
        return (), (f"planned without the learned policy: {error}",)


@lru_cache(maxsize=1)
def _learned() -> Source:
    """The policy with the weights that ship, read once."""
    from .policy import Learned, Policy  # 20 ms that importing the planner can do without

    return Learned(Policy.load())
