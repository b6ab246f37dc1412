"""What the change from the running plan costs, and when it has paid."""

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import HOUR_S, Seconds, format_seconds, significant

from ..cost import Infeasible, price
from ..request import Request
from ..search import Found


class PlanChange(Document, frozen=True, kw_only=True):
    """From the running plan to the one that was found."""

    is_kept: bool
    """Whether the running plan is the answer: no change pays in time."""
    horizon_s: Seconds
    """The time in which a change must pay."""
    standstill_s: Seconds
    running_s: Seconds | None
    """Of an iteration of the running plan; None where it cannot go on."""
    pays_after_s: Seconds | None
    """When both have trained on as many samples; None where the running one cannot go on, or is faster."""
    reason: str
    """Why the running plan cannot go on, or nothing."""

    def __str__(self) -> str:
        if self.is_kept:
            return f"the running plan is kept: no change pays within {_duration(self.horizon_s)}"
        text = f"change of the running plan: training stands still for {format_seconds(self.standstill_s)}"
        if self.running_s is None:
            return f"{text}; the running plan cannot go on: {self.reason}"
        now = f"the running plan takes {format_seconds(self.running_s)} an iteration"
        pays = "" if self.pays_after_s is None else f", made up after {_duration(self.pays_after_s)}"
        return f"{text}{pays}; {now}"


def change_of(found: Found, request: Request) -> PlanChange | None:
    """The change that an answer asks for; None where no plan is running."""
    if request.running is None:
        return None
    running_s, reason = _goes_on(request.running, request)
    gain = 0.0 if running_s is None else 1 - found.estimate.iteration_s / running_s
    return PlanChange(
        is_kept=found.is_running,
        horizon_s=request.change_every_s,
        standstill_s=found.change_s,
        running_s=running_s,
        pays_after_s=found.change_s / gain if gain > 0 else None,
        reason=reason,
    )


def _goes_on(running: Plan, request: Request) -> tuple[Seconds | None, str]:
    """Seconds of its iteration on this cluster, or why there is none."""
    there = set(request.cluster.devices)
    gone = [device for device in running.devices if device not in there]
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        return None, f"{gone[0]}{more} {'are' if more else 'is'} not in the cluster"
    try:
        found = price(running, request)
    except NotMeasuredError as error:
        return None, str(error)
    return (None, found.reason) if isinstance(found, Infeasible) else (found.iteration_s, "")


def _duration(seconds: Seconds) -> str:
    """``2.5 h``, ``4 min``, else as seconds."""
    for unit, scale in (("h", HOUR_S), ("min", 60.0)):
        if seconds >= scale:
            return f"{significant(seconds / scale)} {unit}"
    return format_seconds(seconds)
