"""How far the price of a plan is from a run of it, before and after a correction."""

import statistics

from arachne_runtime.errors import ArachneError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.profile import Profile
from arachne_runtime.units import Seconds

from ..cost import Infeasible, price
from ..request import Request
from .run import Run


class Priced(Document, frozen=True, kw_only=True):
    """One price of a plan against the steps of its run."""

    predicted_s: Seconds
    error: float
    """(predicted - measured) / measured, of the median step."""
    step_error: float
    """Median over the steps of the same, without sign."""
    worst_step_error: float

    @classmethod
    def of(cls, predicted_s: Seconds, steps: tuple[Seconds, ...]) -> "Priced":
        """Against seconds of single steps."""
        single = [abs(predicted_s / step - 1) for step in steps]
        return cls(
            predicted_s=predicted_s,
            error=predicted_s / statistics.median(steps) - 1,
            step_error=statistics.median(single),
            worst_step_error=max(single),
        )


class PriceError(Document, frozen=True, kw_only=True):
    """A run against the prices of its plan."""

    run: str
    plan: str
    """Digest."""
    steps: int
    """Steps that count, after the warm-up."""
    measured_s: Seconds
    """Median of the steps."""
    before: Priced | None
    """With the profile as it was; None where it has no price there."""
    after: Priced | None
    """With the corrected profile, which this run helped to correct."""
    held_out: Priced | None
    """With the profile as the other runs alone correct it: what a new plan can expect."""
    because: str = ""
    """Why there is no price."""


def price_error(run: Run, before: Profile, after: Profile, held_out: Profile | None) -> PriceError:
    """Price the plan of a run with each profile."""
    steps = tuple(step for step in run.step_seconds if step > 0)
    prices: list[Priced | None] = []
    because = ""
    for profile in (before, after, held_out):
        found = None if profile is None else _seconds(run, profile)
        because = found if isinstance(found, str) else because
        prices.append(Priced.of(found, steps) if isinstance(found, float) and steps else None)
    return PriceError(
        run=run.name,
        plan=digest(run.plan),
        steps=len(run.step_seconds),
        measured_s=statistics.median(run.step_seconds),
        before=prices[0],
        after=prices[1],
        held_out=prices[2],
        because=because,
    )


def _seconds(run: Run, profile: Profile) -> Seconds | str:
    """The price of the plan, or why there is none."""
    try:
        found = price(run.plan, _request(run, profile))
    except ArachneError as error:
        return str(error)
    return found.reason if isinstance(found, Infeasible) else found.iteration_s


def _request(run: Run, profile: Profile) -> Request:
    """The problem that the plan of a run answers."""
    return Request(
        cluster=run.cluster,
        model=run.model,
        profile=profile,
        global_batch=run.plan.global_batch,
        schedules=(run.plan.schedule,),
    )
