"""Which devices are interchangeable, and every way to deal them to pipelines, each counted once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from arachne_runtime.plan.cluster import Cluster, Node

Vector = tuple[int, ...]
"""Devices of each pool."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of which any may stand for any other: those of one node, or alike nodes of one device."""

    devices: tuple[str, ...]
    nodes: tuple[Node, ...]

    @property
    def apart(self) -> bool:
        """Whether two devices of it are in two nodes."""
        return len(self.nodes) > 1


def find_pools(cluster: Cluster) -> tuple[Pool, ...]:
    """The pools of a cluster."""
    singles: list[list[Node]] = []
    pools: list[Pool] = []
    for node in cluster.nodes:
        if node.entry.gpus > 1:
            pools.append(Pool(node.devices, (node,)))
            continue
        for members in singles:
            if alike(cluster, members[0], node):
                members.append(node)
                break
        else:
            singles.append([node])
    pools += [Pool(tuple(d for n in members for d in n.devices), tuple(members)) for members in singles]
    return tuple(pools)


def alike(cluster: Cluster, a: Node, b: Node) -> bool:
    """Whether swapping two nodes leaves every price as it is: equal devices, equal links to everyone else."""

    def hardware(node: Node) -> tuple[object, ...]:
        entry = node.entry
        inside = entry.intra_GBps if entry.gpus > 1 else None
        return entry.device, entry.gpus, inside, entry.memory_GiB

    def link(x: Node, y: Node) -> tuple[float, float | None]:
        found = cluster.link(x.name, y.name)
        return found.inter_GBps, found.latency_us

    others = [n for n in cluster.nodes if n.name not in (a.name, b.name)]
    return hardware(a) == hardware(b) and all(link(a, n) == link(b, n) for n in others)


def symmetries(cluster: Cluster, pools: Sequence[Pool]) -> tuple[tuple[int, ...], ...]:
    """Permutations of pools that change nothing: those of alike nodes."""
    found = []
    for order in permutations(range(len(pools))):
        moved = [(pools[i], pools[j]) for i, j in enumerate(order) if i != j]
        if all(not a.apart and not b.apart and alike(cluster, a.nodes[0], b.nodes[0]) for a, b in moved):
            found.append(order)
    return tuple(found)


def vectors_within(room: Vector) -> Iterator[Vector]:
    """Every non-zero vector that fits."""
    return (v for v in product(*(range(n + 1) for n in room)) if any(v))


def splits(left: Vector) -> Iterator[tuple[Vector, Vector]]:
    """Every way to take some of the devices, with what is left."""
    for taken in vectors_within(left):
        yield taken, tuple(a - b for a, b in zip(left, taken, strict=True))


def packings(room: Vector, orders: Sequence[tuple[int, ...]]) -> Iterator[tuple[Vector, ...]]:
    """Every way to give devices to one or more pipelines; some may stay idle. One of each set of images."""
    for packing in _descending(room, room):
        if all(_image(packing, order) <= packing for order in orders):
            yield packing


def _descending(room: Vector, most: Vector) -> Iterator[tuple[Vector, ...]]:
    for first in vectors_within(room):
        if first <= most:
            yield (first,)
            rest = tuple(a - b for a, b in zip(room, first, strict=True))
            yield from ((first, *tail) for tail in _descending(rest, first))


def _image(packing: tuple[Vector, ...], order: tuple[int, ...]) -> tuple[Vector, ...]:
    return tuple(sorted((tuple(v[i] for i in order) for v in packing), reverse=True))
