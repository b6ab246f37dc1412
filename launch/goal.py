"""What ``--objective`` means: throughput, cost, a highest price an hour, or a deadline, in one word."""

import re
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from arachne_runtime.errors import UsageError
from arachne_runtime.units import HOUR_S, Seconds

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner.request import Objective

_KIND = re.compile(r"(throughput|cost|(?=@))(?:@([0-9.]+))?")
_DEADLINE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)/([0-9.]+)h(?:@([0-9.]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The fields of a request that say which plan is best."""

    objective: "Objective"
    max_price_per_hour: float | None = None
    deadline_s: Seconds | None = None
    deadline_samples: int | None = None


def goal_from(text: str) -> Goal:
    """``throughput``, ``cost`` or ``2e6/24h`` (samples in time), each with ``@40``: at most 40 an hour.

    ``@40`` alone is that of throughput. A deadline means the cheapest plan that is done by then; a price is
    in the cluster file's currency, for devices and traffic. UsageError for anything else.
    """
    from planner.request import Objective

    if kind := _KIND.fullmatch(text):
        price = _number(kind[2], text) if kind[2] else None
        return Goal(objective=Objective(kind[1] or Objective.THROUGHPUT), max_price_per_hour=price)
    if deadline := _DEADLINE.fullmatch(text):
        samples, hours = _number(deadline[1], text), _number(deadline[2], text)
        return Goal(
            objective=Objective.COST,
            max_price_per_hour=_number(deadline[3], text) if deadline[3] else None,
            deadline_s=hours * HOUR_S,
            deadline_samples=round(samples),
        )
    raise _wrong(text)


def _number(word: str, text: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise _wrong(text) from None
    if not isfinite(number):
        raise _wrong(text)
    return number


def _wrong(text: str) -> UsageError:
    return UsageError(
        f"--objective {text!r} is not throughput, cost, samples by a deadline (2e6/24h), or one of them with "
        f"a highest price an hour (throughput@40)"
    )
