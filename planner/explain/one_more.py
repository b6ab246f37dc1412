"""What one more device, or node, of each type would give: the cluster is enlarged and planned anew."""

from msgspec.structs import replace as changed

from arachne_runtime.errors import NoFeasiblePlanError, NotMeasuredError
from arachne_runtime.plan.cluster import Cluster, NetworkPair, NodeEntry
from arachne_runtime.plan.document import Document
from arachne_runtime.units import Seconds

from ..request import Request, with_cluster
from .ideal import Ideal

FEW_DEVICES = 8
"""Up to so many, one more device is a change worth asking about; in larger clusters it is a node."""


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
    from ..search import find_plan  # the search explains its failures with this package

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


def enlarged(cluster: Cluster, device: str) -> tuple[Cluster, int]:
    """The cluster with one more device of a type (a node of the usual size in a large one), and how many.

    It stands beside the type's largest entry: in its zone, with its figures and links.
    """
    like = max((e for e in cluster.node if e.device == device), key=lambda e: e.gpus * e.count)
    gpus = 1 if len(cluster.devices) <= FEW_DEVICES else like.gpus
    name = fresh_name(cluster, like)
    pairs = tuple(
        _beside(pair, like.name, name) for pair in cluster.network.pair if like.name in pair.between
    )
    network = changed(cluster.network, pair=(*cluster.network.pair, *pairs))
    entry = changed(like, name=name, gpus=gpus, count=1)
    return Cluster(node=(*cluster.node, entry), network=network), gpus


def fresh_name(cluster: Cluster, like: NodeEntry) -> str:
    """A name for one more entry, after that of its like."""
    taken = {*cluster.nodes_by_name, *(entry.name for entry in cluster.node)}
    name = f"{like.name}-more"
    while name in taken:
        name += "-more"
    return name


def _beside(pair: NetworkPair, old: str, new: str) -> NetworkPair:
    """The same link from the new entry; a link among copies of the old one is a link to it."""
    a, b = pair.between
    between = (new, b) if a == old else (a, new)
    return changed(pair, between=between)
