"""Whether a change of plan pays: more samples within the horizon, its standstill counted."""

from dataclasses import dataclass, field

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

HORIZON_S: Seconds = 600.0
"""Over which time a planned change must pay for itself. A default."""
STANDSTILL_S: Seconds = 1.0
"""Of a change beside its bytes: a join of a small model on gloo took 0.25 to 0.45 s (docs/membership.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A plan for the devices that are there, and what it gives."""

    plan: Plan
    samples_per_s: float
    running_samples_per_s: float = 0.0
    """Of the plan that runs, with the same prices; 0 where none runs."""
    migration_s: Seconds = 0.0
    """How long all ranks stand still for the change."""
    compute_s: dict[str, Seconds] = field(default_factory=dict)
    """By device: what it computes in a step of the plan, waits left out; empty: nobody knows."""
    running_compute_s: dict[str, Seconds] = field(default_factory=dict)
    """Likewise, of the plan that runs."""


def samples_in(offer: Offer, horizon_s: Seconds) -> float:
    """Samples of the horizon with the change: the new rate, less the standstill."""
    return offer.samples_per_s * max(0.0, horizon_s - offer.migration_s)


def pays(offer: Offer, horizon_s: Seconds) -> bool:
    """Samples of the horizon with the change against those without."""
    return samples_in(offer, horizon_s) > offer.running_samples_per_s * horizon_s
