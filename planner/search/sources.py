"""Which sources a search asks when nothing is said."""

from functools import lru_cache

from arachne_runtime.errors import InvalidFileError, PolicyMissingError, PolicyStaleError

from ..request import Request
from .propose import Enumeration, Source
from .running import Running
from .uniform import Uniform


def usual_sources(request: Request) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """What runs now, uniform plans, the policy, enumeration; and why one that should be there is not."""
    before: tuple[Source, ...] = (*((Running(),) if request.running is not None else ()), Uniform())
    try:
        return (*before, _learned(), Enumeration()), ()
    except (PolicyMissingError, PolicyStaleError, InvalidFileError) as error:
        return (*before, Enumeration()), (f"planned without the learned policy: {error}",)


@lru_cache(maxsize=1)
def _learned() -> Source:
    """The policy with the weights that ship, read once."""
    from ..policy import Learned, Policy  # a policy builds on this package

    return Learned(Policy.load())
