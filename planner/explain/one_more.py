"""What one more device, or node, of each type would give: the cluster is enlarged and planned anew."""

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.document import Document
from arachne_runtime.units import Seconds

from ..cost import Ideal
from ..request import Request, with_cluster
from ..search import enlarged, find_plan


class Gain(Document, frozen=True, kw_only=True):
    """One enlargement."""

    device: str
    """Device type."""
    added: int
    """Devices, in one node of their own."""
    samples_per_s: float
    """Of the best plan found with them."""
    gain: float
    """Of throughput: 0.05 is 5 % more. 0 where no faster plan was found in the budget."""
    at_same_share: float
    """The gain of a plan that reaches the same share of the ideal with them."""

    def __str__(self) -> str:
        what = "device" if self.added == 1 else f"node of {self.added}"
        gives = f"{100 * self.gain:+.1f} %" if self.gain > 0 else "no faster plan found"
        share = f"{100 * self.at_same_share:+.1f} % at the same share of the ideal"
        return f"one more {self.device} {what}: {gives} ({share})"


def one_more(
    request: Request,
    samples_per_s: float,
    *,
    budget_s: Seconds = 0.5,
    evaluations: int | None = None,
    seed: int = 0,
) -> tuple[Gain, ...]:
    """For each device type of the cluster, the gain over a plan of ``samples_per_s``, in the file's order.

    ``budget_s`` for each search; with ``evaluations`` these are limited instead.
    """
    found, ideal = [], Ideal(request)
    for device in dict.fromkeys(entry.device for entry in request.cluster.node):
        cluster, added = enlarged(request.cluster, device)
        try:
            better = find_plan(
                with_cluster(request, cluster), seed=seed, time_budget_s=budget_s, evaluations=evaluations
            )
            rate = max(samples_per_s, better.estimate.samples_per_s)
        except (NoFeasiblePlanError, NotMeasuredError):  # the budget ended first: the old plan still runs
            rate = samples_per_s
        found.append(
            Gain(
                device=device,
                added=added,
                samples_per_s=rate,
                gain=max(0.0, rate / samples_per_s - 1),
                at_same_share=added * ideal.speeds[device] / ideal.total_speed,
            )
        )
    return tuple(found)
