"""Devices of a cluster with the figures that a price needs: the cluster file's own, else the catalog's."""

from dataclasses import dataclass
from itertools import combinations

from arachne_runtime.errors import InvalidFileError, Problem, UsageError
from arachne_runtime.plan.cluster import Cluster, NodeEntry, index_of
from arachne_runtime.plan.profile import LinkScope, Profile
from arachne_runtime.units import GB, GIB, Bytes

from ..catalog.devices import CURRENCY, GPU_RESERVE_BYTES, NCCL_LATENCY_US, DeviceType, device
from .links import Link, curves_of


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node: every device of it is alike."""

    name: str
    order: int
    """Its position in the cluster file."""
    gpus: int
    device: DeviceType
    memory_bytes: Bytes
    price_per_hour: float | None
    """Of one device, in the cluster file's currency."""


class Fleet:
    """Nodes by name and links by pair of nodes; each is worked out once."""

    def __init__(self, cluster: Cluster, profile: Profile) -> None:
        self.cluster = cluster
        self.profile = profile
        facts = _entries(cluster)
        self.nodes: dict[str, NodeFacts] = {
            node.name: NodeFacts(node.name, order, node.entry.gpus, *facts[node.entry.name])
            for order, node in enumerate(cluster.nodes)
        }
        self.list_priced = tuple(
            dict.fromkeys(
                node.device.name
                for node in self.nodes.values()
                if node.price_per_hour is not None
                and cluster.nodes_by_name[node.name].entry.price_per_hour is None
            )
        )
        """Device types of nodes without a price of their own: the catalog's list price stands in."""
        self._kinds = _kinds(cluster, self.nodes)
        self._links: dict[tuple[int, int], Link] = {}
        self._inside: dict[str, Link] = {}
        self._among: dict[tuple[frozenset[tuple[int, bool]], frozenset[str]], tuple[Link, ...]] = {}
        self._interned: dict[object, Link] = {}

    def node(self, name: str) -> NodeFacts:
        """Facts of a node; UsageError where the cluster has none of that name."""
        found = self.nodes.get(name)
        if found is None:
            raise UsageError(f"node {name!r} is not in the cluster; it has {', '.join(self.nodes)}")
        return found

    def check_device(self, name: str, node: NodeFacts) -> None:
        """UsageError where a device's index is beyond its node's devices."""
        if not 0 <= index_of(name) < node.gpus:
            raise UsageError(f"device {name} is not in the cluster: node {node.name} has {node.gpus} devices")

    def link(self, a: str, b: str) -> Link:
        """The link from a device of node ``a`` to a device of node ``b``."""
        if a == b:
            inside = self._inside.get(a)
            if inside is None:
                inside = self._inside[a] = self._intern(self._intra(a))
            return inside
        key = self._kinds[a], self._kinds[b]
        found = self._links.get(key)
        if found is None:
            found = self._intern(self._inter(a, b))
            self._links[key] = self._links[key[::-1]] = found
        return found

    def kind_of(self, name: str) -> tuple[int, int]:
        """Equal for nodes of one device type with equal links, inside and to all others."""
        return self._kinds[name], id(self.link(name, name))

    def links_among(self, names: tuple[str, ...], crowded: bool) -> tuple[Link, ...]:
        """Every different link between these nodes, and inside them where they are few or ``crowded``."""
        of_kind: dict[int, list[str]] = {}
        for name in names:
            of_kind.setdefault(self._kinds[name], []).append(name)
        inside = crowded or len(names) == 1
        entries = {self.cluster.nodes_by_name[n].entry.name: n for n in names} if inside else {}
        key = frozenset((kind, len(found) > 1) for kind, found in of_kind.items()), frozenset(entries)
        known = self._among.get(key)
        if known is None:
            few = [name for found in of_kind.values() for name in found[:2]]
            pairs = [*combinations(few, 2), *((n, n) for n in entries.values())]
            known = self._among[key] = tuple({id(k): k for k in (self.link(*p) for p in pairs)}.values())
        return known

    def _intra(self, name: str) -> Link:
        node, entry = self.node(name), self.cluster.nodes_by_name[name].entry
        device = node.device
        curves = curves_of(self.profile.links, device.name, device.name, LinkScope.INTRA)
        stated = entry.intra_GBps or (None if curves else device.intra_GBps)
        per_byte = 1 / (stated * GB) if stated else 0.0
        return Link(LinkScope.INTRA, device.intra_latency_us * 1e-6, per_byte, curves)

    def _intern(self, link: Link) -> Link:
        """Equal links are one object, so that a set of nodes has few."""
        key = (link.scope, link.latency_s, link.seconds_per_byte, link.curves)
        return self._interned.setdefault(key, link)

    def _inter(self, a: str, b: str) -> Link:
        types = self.node(a).device.name, self.node(b).device.name
        pair = self.cluster.link(a, b)
        latency = pair.latency_us if pair.latency_us is not None else self.cluster.network.latency_us
        curves = curves_of(self.profile.links, *types, LinkScope.INTER)
        return Link(LinkScope.INTER, latency * 1e-6, 1 / (pair.inter_GBps * GB), curves)


def _kinds(cluster: Cluster, nodes: dict[str, NodeFacts]) -> dict[str, int]:
    """A number for each node; those with equal ones have one device type, and equal links to all others."""
    named = {place for pair in cluster.network.pair for place in pair.between}
    numbers: dict[tuple[object, ...], int] = {}
    found = {}
    for node in cluster.nodes:
        places = (node.name, node.entry.name, node.entry.zone)
        key = nodes[node.name].device.name, *(place if place in named else None for place in places)
        found[node.name] = numbers.setdefault(key, len(numbers))
    return found


def _entries(cluster: Cluster) -> dict[str, tuple[DeviceType, Bytes, float | None]]:
    found, problems = {}, []
    for i, entry in enumerate(cluster.node):
        try:
            found[entry.name] = _facts(entry, cluster.currency)
        except UsageError as error:
            problems.append(Problem(f"$.node[{i}].device", str(error)))
    if problems:
        raise InvalidFileError("cluster", problems)
    return found


def _facts(entry: NodeEntry, currency: str) -> tuple[DeviceType, Bytes, float | None]:
    known = _device_of(entry)
    memory = known.memory_bytes if entry.memory_GiB is None else int(entry.memory_GiB * GIB)
    listed = known.price_per_hour if currency == CURRENCY else None
    return known, memory, listed if entry.price_per_hour is None else entry.price_per_hour


def _device_of(entry: NodeEntry) -> DeviceType:
    """The catalog's device type, or one that the entry itself describes with its memory and bandwidth."""
    try:
        return device(entry.device)
    except UsageError as error:
        if entry.memory_GiB is None or (entry.intra_GBps is None and entry.gpus > 1):
            raise UsageError(f"{error}; or give memory_GiB and intra_GBps of {entry.name!r}") from None
    return DeviceType(
        name=entry.device,
        memory_bytes=int(entry.memory_GiB * GIB),
        intra_GBps=entry.intra_GBps or 0.0,
        intra_latency_us=NCCL_LATENCY_US,
        memory_GBps=None,
        reserve_bytes=GPU_RESERVE_BYTES,
        source="the cluster file",
    )
