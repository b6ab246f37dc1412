"""Devices that a plan leaves out, and why: the fastest plan that was priced with them."""

from collections.abc import Iterable

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan

from ..cost import Estimate
from ..request import Objective, Request
from ..search.score import Score, score_of


class Idle(Document, frozen=True, kw_only=True):
    """Idle devices of one type."""

    device: str
    """Device type."""
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} {self.device}: {self.reason}"


def idle_devices(
    plan: Plan, estimate: Estimate, others: Iterable[tuple[Plan, Estimate]], request: Request
) -> tuple[Idle, ...]:
    """By type, in the file's order; ``others``: plans that were priced."""
    cluster, best = request.cluster, score_of(plan, estimate, request)
    used, all_ = _by_type(plan, cluster), dict[str, int]()
    for entry in cluster.node:
        all_[entry.device] = all_.get(entry.device, 0) + entry.gpus * entry.count
    priced = [(score_of(other, found, request), _by_type(other, cluster)) for other, found in others]
    found = []
    for device, count in all_.items():
        idle = count - used.get(device, 0)
        if idle:
            more = [score for score, counts in priced if counts.get(device, 0) > used.get(device, 0)]
            found.append(Idle(device=device, count=idle, reason=_reason(more, best, request)))
    return tuple(found)


def _reason(more: list[Score], best: Score, request: Request) -> str:
    """Under the request's objective; a plan that misses a limit is no better for being faster."""
    if not more:
        return "no plan among the best uses more of them"
    nearest = min(more)
    if nearest.excess > best.excess:
        given = {"price limit": request.max_price_per_hour, "deadline": request.deadline_s}
        limits = " or the ".join(name for name, value in given.items() if value is not None)
        return f"the nearest plan with more of them is {100 * nearest.excess:.0f} % above the {limits}"
    ratio = nearest.value / best.value
    if request.objective is Objective.COST:
        return f"they do not pay: the best plan with more of them costs {ratio:.3f}x as much a sample"
    return f"they do not pay: the best plan with more of them takes {ratio:.3f}x as long"


def _by_type(plan: Plan, cluster: Cluster) -> dict[str, int]:
    counts: dict[str, int] = {}
    for device in plan.devices:
        kind = cluster.device_type(device)
        counts[kind] = counts.get(kind, 0) + 1
    return counts
