"""Which sources a search asks when nothing is said."""

from ..request import Request
from .propose import Enumeration, Source
from .running import Running
from .uniform import Uniform


def usual_sources(request: Request) -> tuple[Source, ...]:
    """What runs now, uniform plans, the enumeration."""
    running = (Running(),) if request.running is not None else ()
    return (*running, Uniform(), Enumeration())
