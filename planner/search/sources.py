"""Which sources a search asks when nothing is said."""

from functools import lru_cache

from arachne_runtime.errors import InvalidFileError, PolicyMissingError, PolicyStaleError

from ..request import Request
from .propose import Enumeration, Source
from .running import Running
from .uniform import Uniform


def usual_sources(request: Request, *, learned: bool = False) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """What runs now, uniform plans, the policy if it is ``learned``, enumeration; and what has to be said.

    The policy is not asked unless it is wanted: in short searches the enumeration alone finds better plans
    (docs/negative-results.md).
    """
    before: tuple[Source, ...] = (*((Running(),) if request.running is not None else ()), Uniform())
    if not learned:
        return (*before, Enumeration()), ()
    try:
        return (*before, _learned(), Enumeration()), ()
    except (PolicyMissingError, PolicyStaleError, InvalidFileError) as error:
        return (*before, Enumeration()), (f"planned without the learned policy: {error}",)


@lru_cache(maxsize=1)
def _learned() -> Source:
    """The policy with the weights that ship, read once."""
    from ..policy import Learned, Policy  # a policy builds on this package

    return Learned(Policy.load())
