"""What every rival planner offers: one proposal for a request, or none."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cost import Estimate, price
from ..request import Request

DEFAULT_BUDGET_S: Seconds = 20.0
"""What a strategy may take unless told otherwise, in seconds of its thread's CPU time."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A budget that runs from its making, in CPU time of its thread: a busy machine takes none of it."""

    budget_s: Seconds
    _started_s: Seconds = field(default_factory=time.thread_time)

    @property
    def left_s(self) -> Seconds:
        """Seconds left, negative once it is over."""
        return self.budget_s - (time.thread_time() - self._started_s)

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0


class Strategy(Protocol):
    """A planner under our price; the same request gives the same plan where the budget does not end it."""

    @property
    def name(self) -> str:
        """Its word in reports, lower case."""
        ...

    def propose(self, request: Request, *, budget_s: Seconds = DEFAULT_BUDGET_S) -> Plan | None:
        """The best plan that it finds in ``budget_s`` of CPU time, or None where it finds none that fits.

        Raises NotMeasuredError where what it would try reaches beyond the profile.
        """
        ...


def best(request: Request, clock: Clock, *grids: Iterable[Plan]) -> Plan | None:
    """The fastest plan of the first grid of which any fits, the first of equals; None where none fits.

    Ends with the budget. Raises NotMeasuredError where no plan fits and some reach beyond the profile.
    """
    beyond: NotMeasuredError | None = None
    for grid in grids:
        found: tuple[float, Plan] | None = None
        for plan in grid:
            if clock.over:
                break
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
