"""The search as ``planner.find_plan``: with the learned policy among its sources, where that is wanted.

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
    """``planner.search.find_plan``; ``learned``: with the policy beside the usual sources.

    It counts only without ``sources``. The policy is not asked unless it is wanted: in short searches the
    enumeration with moves finds plans that are as good (docs/negative-results.md).
    """
    notes: tuple[str, ...] = ()
    if learned and sources is None:
        sources, notes = with_policy(request)
    return search.find_plan(
        request,
        seed=seed,
        time_budget_s=time_budget_s,
        evaluations=evaluations,
        on_progress=on_progress,
        peers=peers,
        sources=sources,
        notes=notes,
        clock=clock,
        steps=steps,
    )


def with_policy(request: Request) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """The usual sources with the policy behind the enumeration, where it can be read; what has to be said."""
    usual = usual_sources(request)
    try:
        at = 1 + next(i for i, source in enumerate(usual) if isinstance(source, Enumeration))
        return (*usual[:at], _learned(), *usual[at:]), ()
    except (PolicyMissingError, PolicyStaleError, InvalidFileError) as error:
        return usual, (f"planned without the learned policy: {error}",)


@lru_cache(maxsize=1)
def _learned() -> Source:
    """The policy with the weights that ship, read once."""
    from .policy import Learned, Policy  # 20 ms that importing the planner can do without

    return Learned(Policy.load())
