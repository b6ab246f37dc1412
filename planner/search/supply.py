"""What there is to plan with: pools of alike devices, their nodes, and the tensor-parallel groups they hold.

Two nodes are in one pool where nothing but their sizes tells them apart; the sizes matter to groups only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import Cluster, Node
from arachne_runtime.units import Bytes

from ..cost.fleet import NodeFacts
from ..request import Request


@dataclass(frozen=True)
class Pool:
    """Alike devices."""

    device: str
    """Device type."""
    room_bytes: Bytes
    """Memory of a device without the reserve."""
    price_per_hour: float
    """Of one device; 0 where no price is known."""
    nodes: tuple[tuple[str, int], ...]
    """Name and number of devices of each node, in the order of the cluster file."""
    degrees: tuple[int, ...]
    """TP degrees that were measured and that some node holds, ascending."""

    @cached_property
    def num_devices(self) -> int:
        """Of all nodes."""
        return sum(size for _, size in self.nodes)

    @cached_property
    def node_size(self) -> int:
        """Devices of the usual node, the larger of equally many."""
        sizes = [size for _, size in self.nodes]
        return max(dict.fromkeys(sizes), key=lambda size: (size * sizes.count(size), size))

    def groups(self, tp: int) -> int:
        """Tensor-parallel groups of ``tp`` devices that its nodes hold at once."""
        return sum(size // tp for _, size in self.nodes)


@dataclass(frozen=True)
class Supply:
    """All pools of a cluster, those with most devices first."""

    pools: tuple[Pool, ...]

    @classmethod
    def of(cls, request: Request) -> "Supply":
        """Devices whose type was measured at some TP degree that its nodes hold."""
        found: dict[tuple[object, ...], list[NodeFacts]] = {}
        for node in request.cluster.nodes:
            facts = request.fleet.node(node.name)
            found.setdefault(likeness(request.cluster, node, facts), []).append(facts)
        pools = [pool for nodes in found.values() if (pool := _pool(request, nodes)).degrees]
        return cls(tuple(sorted(pools, key=lambda pool: -pool.num_devices)))

    @cached_property
    def num_devices(self) -> int:
        """Of all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees of any pool, ascending."""
        return tuple(sorted({tp for pool in self.pools for tp in pool.degrees}))

    @cached_property
    def limits(self) -> tuple["Limit", ...]:
        """What any choice of tensor-parallel groups must keep to, and may keep to."""
        return tuple(limit for p, pool in enumerate(self.pools) for limit in _limits(p, pool))


@dataclass(frozen=True, slots=True)
class Limit:
    """Groups of at least ``tp`` devices take so many places for ``tp``, of which the nodes have ``places``.

    For degrees that divide each other these limits are exact: the largest groups are seated first, and what
    they leave of a node holds all the smaller ones that its free devices make up.
    """

    pool: int
    tp: int
    places: int

    def taken(self, degree: int) -> int:
        """Places that one group of ``degree`` devices takes."""
        return -(-degree // self.tp) if degree >= self.tp else 0


def use_of(
    limits: Sequence[Limit], pool: NDArray[np.int64], tp: NDArray[np.int64], width: NDArray[np.int64]
) -> NDArray[np.int64]:
    """``[K, limits]``: places that one copy of each of K templates takes; the other arrays are ``[K, S]``."""
    found = np.zeros((len(pool), len(limits)), np.int64)
    for at, limit in enumerate(limits):
        counts = (pool == limit.pool) & (tp >= limit.tp)
        found[:, at] = np.where(counts, -(-tp // limit.tp) * width, 0).sum(axis=1)
    return found


def _limits(index: int, pool: Pool) -> Iterator[Limit]:
    for tp in dict.fromkeys((1, *pool.degrees)):
        yield Limit(index, tp, pool.groups(tp))


def _pool(request: Request, nodes: Sequence[NodeFacts]) -> Pool:
    first = nodes[0]
    largest = max(node.gpus for node in nodes)
    return Pool(
        device=first.device.name,
        room_bytes=first.memory_bytes - first.device.reserve_bytes,
        price_per_hour=first.price_per_hour or 0.0,
        nodes=tuple((node.name, node.gpus) for node in nodes),
        degrees=tuple(tp for tp in request.tables.tp_degrees(first.device.name) if tp <= largest),
    )


def likeness(cluster: Cluster, node: Node, facts: NodeFacts) -> tuple[object, ...]:
    """Equal for nodes that differ in name and size only."""
    entry = node.entry
    named = {place for pair in cluster.network.pair for place in pair.between}
    own = [place for place in (node.name, entry.name) if place in named]
    return facts.device.name, facts.memory_bytes, facts.price_per_hour, entry.intra_GBps, entry.zone, *own[:1]
