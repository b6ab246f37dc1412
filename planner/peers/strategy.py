"""What every rival planner offers: one proposal for a request, or none."""

from collections.abc import Iterable
from typing import Protocol

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.plan import Plan

from ..cost import Estimate, price
from ..request import Request


class Strategy(Protocol):
    """A planner under our price; the same request gives the same plan."""

    @property
    def name(self) -> str:
        """Its word in reports, lower case."""
        ...

    def propose(self, request: Request) -> Plan | None:
        """Its best plan, or None where it has none that fits. Raises NotMeasuredError."""
        ...


def best(request: Request, *grids: Iterable[Plan]) -> Plan | None:
    """The fastest plan of the first grid of which any fits, the first of equals; None where none fits.

    Raises NotMeasuredError where no plan fits and some reach beyond the profile.
    """
    beyond: NotMeasuredError | None = None
    for grid in grids:
        found: tuple[float, Plan] | None = None
        for plan in grid:
            try:
                outcome = price(plan, request)
            except NotMeasuredError as error:
                beyond = error
                continue
            if isinstance(outcome, Estimate) and (found is None or outcome.iteration_s < found[0]):
                found = outcome.iteration_s, plan
        if found:
            return found[1]
    if beyond is not None:
        raise beyond
    return None


def most_micro_batch(request: Request) -> int:
    """Largest micro-batch that the request allows."""
    return min(request.global_batch, request.max_micro_batch or request.global_batch)
