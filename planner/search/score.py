"""Which of two plans is better: one number under the request's objective, and how far it misses a limit."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import HOUR_S, Seconds, format_seconds, significant

from ..cost import Estimate
from ..request import Objective, Request
from .migrate import change_factor, stretched

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """Less is better; first the limits, then the objective."""

    excess: float
    """Part by which the price limit or the deadline is exceeded; 0 where both are kept."""
    value: float
    """Seconds of an iteration, or money for a sample; longer where a change from the running plan costs."""


WORST = Score(float("inf"), float("inf"))
"""Of a plan that does not fit."""


def score_of(plan: Plan, estimate: Estimate, request: Request) -> Score:
    """The score of a priced plan."""
    return _scored(estimate, change_factor(plan, request), request)


def standing_still(estimate: Estimate, request: Request) -> Score:
    """The best that a change to a plan could score: if it cost the pause alone, and nothing moved."""
    return _scored(estimate, stretched(request.migration_pause_s, request), request)


def _scored(estimate: Estimate, factor: float, request: Request) -> Score:
    value = estimate.iteration_s * factor
    hourly = estimate.price_per_hour or 0.0  # where money counts, a request without prices is refused
    if request.objective is Objective.COST:
        value *= hourly / HOUR_S / request.global_batch
    return Score(_excess(estimate.iteration_s, hourly, request), value)


def _excess(iteration_s: Seconds, hourly: float, request: Request) -> float:
    over = 0.0
    if request.max_price_per_hour is not None:
        over = max(over, hourly / request.max_price_per_hour - 1)
    if (longest := longest_iteration_s(request)) is not None:
        over = max(over, iteration_s / longest - 1)
    return over


def values_of(seconds: Floats, hourly: Floats, request: Request) -> Floats:
    """The objective of many closed forms, with the devices' prices only; far off where a limit is missed."""
    value = seconds
    if request.objective is Objective.COST:
        value = np.where(np.isfinite(seconds), np.where(np.isfinite(seconds), seconds, 0.0) * hourly, np.inf)
    finite = value[np.isfinite(value)]
    far = 1e6 * float(finite.max(initial=1.0))
    if request.max_price_per_hour is not None:
        value = value + far * np.maximum(0.0, hourly / request.max_price_per_hour - 1)
    longest = longest_iteration_s(request)
    if longest is not None:
        value = value + far * np.maximum(0.0, seconds / longest - 1)
    return value


def longest_iteration_s(request: Request) -> Seconds | None:
    """The longest iteration that keeps the deadline; None without one."""
    if request.deadline_s is None or request.deadline_samples is None:
        return None
    return request.deadline_s * request.global_batch / request.deadline_samples


def missed(estimate: Estimate, request: Request) -> str:
    """Why a plan that fits is no answer, and the smallest change of the limits that would make it one."""
    seconds = estimate.iteration_s
    parts = []
    hourly = estimate.price_per_hour or 0.0
    if request.max_price_per_hour is not None and hourly > request.max_price_per_hour:
        parts.append(
            f"the price limit of {request.max_price_per_hour:g} {estimate.currency} an hour: the nearest "
            f"plan costs {significant(hourly, 4)} with its traffic, so allow that much"
        )
    longest = longest_iteration_s(request)
    if longest is not None and seconds > longest:
        assert request.deadline_samples is not None
        needed = seconds * request.deadline_samples / request.global_batch
        parts.append(
            f"the deadline of {format_seconds(request.deadline_s or 0.0)} for {request.deadline_samples} "
            f"samples: the nearest plan needs {format_seconds(needed)}, so allow that long"
        )
    return f"no plan for {request.model.name} was found that keeps " + "; nor ".join(parts)
