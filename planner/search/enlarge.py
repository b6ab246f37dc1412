"""A cluster with one more device, or node, of a type."""

from msgspec.structs import replace as changed

from arachne_runtime.plan.cluster import Cluster, NetworkPair, NodeEntry

FEW_DEVICES = 8
"""Up to so many, one more device is a change worth asking about; in larger clusters it is a node."""


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
    return changed(cluster, node=(*cluster.node, entry), network=network), gpus


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
