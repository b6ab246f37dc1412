"""What every rival planner offers: one proposal for a request, or none."""

from collections.abc import Iterable
from typing import Protocol

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


def best(plans: Iterable[Plan], request: Request) -> Plan | None:
    """The fastest plan under the price, the first of equals; None where none fits."""
    found: tuple[float, Plan] | None = None
    for plan in plans:
        outcome = price(plan, request)
        if isinstance(outcome, Estimate) and (found is None or outcome.iteration_s < found[0]):
            found = outcome.iteration_s, plan
    return found[1] if found else None
