"""Whether a change of plan pays: more samples within the horizon, its standstill counted."""

from dataclasses import dataclass

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A plan for the devices that are there, and what it gives."""

    plan: Plan
    samples_per_s: float
    running_samples_per_s: float = 0.0
    """Of the plan that runs, with the same prices; 0 where none runs."""
    migration_s: Seconds = 0.0
    """How long all ranks stand still for the change."""


def pays(offer: Offer, horizon_s: Seconds) -> bool:
    """Samples of the horizon with the change against those without: the new rate, less the standstill."""
    with_change = offer.samples_per_s * max(0.0, horizon_s - offer.migration_s)
    return with_change > offer.running_samples_per_s * horizon_s
