"""Devices that a plan leaves out, and why: the fastest plan that was priced with them."""

from collections.abc import Iterable

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds


class Idle(Document, frozen=True, kw_only=True):
    """Idle devices of one type."""

    device: str
    """Device type."""
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} {self.device}: {self.reason}"


def idle_devices(
    plan: Plan, iteration_s: Seconds, others: Iterable[tuple[Plan, Seconds]], cluster: Cluster
) -> tuple[Idle, ...]:
    """By type, in the file's order; ``others``: plans that were priced, with their iterations."""
    used, all_ = _by_type(plan, cluster), dict[str, int]()
    for entry in cluster.node:
        all_[entry.device] = all_.get(entry.device, 0) + entry.gpus * entry.count
    priced = [(seconds, _by_type(other, cluster)) for other, seconds in others]
    found = []
    for device, count in all_.items():
        idle = count - used.get(device, 0)
        if idle:
            more = [s for s, counts in priced if counts.get(device, 0) > used.get(device, 0)]
            found.append(Idle(device=device, count=idle, reason=_reason(more, iteration_s)))
    return tuple(found)


def _reason(more: list[Seconds], iteration_s: Seconds) -> str:
    if not more:
        return "no plan among the best uses more of them"
    return f"they do not pay: the best plan with more of them takes {min(more) / iteration_s:.3f}x as long"


def _by_type(plan: Plan, cluster: Cluster) -> dict[str, int]:
    counts: dict[str, int] = {}
    for device in plan.devices:
        kind = cluster.device_type(device)
        counts[kind] = counts.get(kind, 0) + 1
    return counts
