"""The devices there are and the links between them, as a person writes them in ``cluster.toml``."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from .document import Document

CLUSTER_FORMAT: Literal["arachne.cluster/1"] = "arachne.cluster/1"


class NodeEntry(Document, frozen=True, kw_only=True):
    """One ``[[node]]`` of the file: one node, or ``count`` nodes that are alike."""

    name: str
    """Name of the node; with ``count > 1`` the nodes are called ``name-0``, ``name-1``, ..."""
    device: str
    """Device type: a key of the catalog."""
    gpus: int
    """Devices of each node."""
    count: int = 1
    intra_GBps: float | None = None
    """Bandwidth between two devices of the node, in 1e9 bytes a second; None: the catalog's."""
    memory_GiB: float | None = None
    """Memory of a device; None: the catalog's."""
    price_per_hour: float | None = None
    """Price of one device for an hour; None: the catalog's."""
    zone: str | None = None


class NetworkPair(Document, frozen=True, kw_only=True):
    """A link between two named places that differs from the general network."""

    between: tuple[str, str]
    """Names of ``[[node]]`` entries (all their copies), of nodes, or of zones."""
    inter_GBps: float
    latency_us: float | None = None
    price_per_GB: float | None = None


class Network(Document, frozen=True, kw_only=True):
    """How nodes reach each other."""

    inter_GBps: float
    """Bandwidth of a node's NIC in one direction, in 1e9 bytes a second."""
    latency_us: float = 10.0
    pair: tuple[NetworkPair, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the expanded cluster."""

    name: str
    entry: NodeEntry

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of its devices, ``node:index``."""
        return tuple(f"{self.name}:{index}" for index in range(self.entry.gpus))


class Cluster(Document, frozen=True, kw_only=True, dict=True):
    """All devices that a plan may use."""

    format: Literal["arachne.cluster/1"] = CLUSTER_FORMAT
    currency: str = "USD"
    """Of every price in the file, as a code of ISO 4217; list prices stand in for US dollars only."""
    node: tuple[NodeEntry, ...]
    network: Network

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, in the order of the file."""
        return tuple(
            Node(entry.name if entry.count == 1 else f"{entry.name}-{copy}", entry)
            for entry in self.node
            for copy in range(entry.count)
        )

    @cached_property
    def nodes_by_name(self) -> dict[str, Node]:
        """Every node by its name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Every device, ``node:index``, in the order of the file."""
        return tuple(device for node in self.nodes for device in node.devices)

    def device_type(self, device: str) -> str:
        """Device type (catalog key) of ``node:index``; KeyError if the node is not in the cluster."""
        return self.nodes_by_name[node_of(device)].entry.device

    def link(self, a: str, b: str) -> NetworkPair:
        """The link between two *nodes* ``a`` and ``b``; the general network where no pair names them.

        A pair that names nodes wins over one that names entries, which wins over one that names zones.
        """
        places_a, places_b = _places(self.nodes_by_name[a]), _places(self.nodes_by_name[b])
        best: tuple[int, NetworkPair] | None = None
        for pair in self.network.pair:
            x, y = pair.between
            for p, q in ((x, y), (y, x)):
                if p in places_a and q in places_b:
                    rank = places_a.index(p) + places_b.index(q)
                    if best is None or rank < best[0]:
                        best = (rank, pair)
        found = best[1] if best else NetworkPair(between=(a, b), inter_GBps=self.network.inter_GBps)
        if found.latency_us is None:
            return msgspec.structs.replace(found, latency_us=self.network.latency_us)
        return found


def node_of(device: str) -> str:
    """``"a-0:3"`` → ``"a-0"``."""
    return device.rpartition(":")[0]


def index_of(device: str) -> int:
    """``"a-0:3"`` → ``3``; ValueError where the text after the colon is not a number."""
    return int(device.rpartition(":")[2])


def _places(node: Node) -> list[str]:
    names = [node.name, node.entry.name]
    return [*names, node.entry.zone] if node.entry.zone else names
