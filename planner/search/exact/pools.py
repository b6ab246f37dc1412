"""Which tensor-parallel groups there are, which of them are alike, and permutations that change nothing.

Two groups of one size in a node are alike, and so are two single-device nodes, neighbours in the file, with
the same hardware and the same links. A *seating* says into which groups every node is divided.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations, product

from arachne_runtime.plan.cluster import Cluster, Node

from ..counts import Counts

Partition = tuple[int, ...]
"""Sizes of the groups of a node, descending."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Groups of devices of which any may stand for any other."""

    device: str
    """Device type."""
    tp: int
    """Devices of each group."""
    seats: tuple[tuple[str, ...], ...]
    """The devices of each group."""


@dataclass(frozen=True, slots=True)
class Pools:
    """All groups of one seating, by pool, with the symmetries between pools."""

    pools: tuple[Pool, ...]
    symmetries: tuple[tuple[int, ...], ...]
    """Permutations of pool indices under which every price stays the same; the identity is one of them."""

    @property
    def counts(self) -> Counts:
        """Groups of each pool."""
        return tuple(len(pool.seats) for pool in self.pools)

    def canonical(self, packing: Sequence[Counts]) -> bool:
        """Whether this unordered list of vectors stands for all its images under the symmetries."""
        own = tuple(sorted(packing, reverse=True))
        return all(own >= self._image(packing, symmetry) for symmetry in self.symmetries)

    def _image(self, packing: Sequence[Counts], symmetry: tuple[int, ...]) -> tuple[Counts, ...]:
        return tuple(sorted((tuple(v[i] for i in symmetry) for v in packing), reverse=True))


def find_pools(cluster: Cluster) -> Pools:
    """The seating without tensor parallelism, pools in the order of the cluster's file."""
    return next(seatings(cluster, {}))


def seatings(cluster: Cluster, degrees: Mapping[str, Sequence[int]]) -> Iterator[Pools]:
    """Every way to divide the nodes into groups of measured TP degrees, those that are alike once.

    ``degrees`` by device type, 1 where a type is not named. Devices of a group that is not used are idle, so
    a node is divided as far as it goes. The smallest groups come first.
    """
    classes = list(_classes(cluster))
    ways = [_ways(members, degrees.get(members[0].entry.device, (1,))) for members in classes]
    for chosen in product(*ways):
        yield _seated(list(zip(classes, chosen, strict=True)))


def _ways(members: Sequence[Node], degrees: Sequence[int]) -> list[tuple[Partition, ...]]:
    """A partition for each of some alike nodes, unordered."""
    partitions = sorted(_partitions(members[0].entry.gpus, degrees), key=lambda p: (-len(p), p))
    return list(combinations_with_replacement(partitions, len(members)))


def _partitions(size: int, degrees: Sequence[int], largest: int | None = None) -> Iterator[Partition]:
    """Groups that leave no room for another one."""
    fitting = [d for d in degrees if d <= size and (largest is None or d <= largest)]
    if not any(d <= size for d in degrees):
        yield ()
    for first in sorted(fitting, reverse=True):
        for rest in _partitions(size - first, degrees, first):
            yield (first, *rest)


def _seated(nodes: Sequence[tuple[list[Node], tuple[Partition, ...]]]) -> Pools:
    pools: list[Pool] = []
    groups: list[list[tuple[int, ...]]] = []
    for members, partitions in nodes:
        if members[0].entry.gpus == 1:
            if partitions[0]:
                groups.append([(len(pools),)])
                pools.append(Pool(members[0].entry.device, 1, tuple((n.devices[0],) for n in members)))
            continue
        alike: dict[Partition, list[tuple[int, ...]]] = {}
        for node, partition in zip(members, partitions, strict=True):
            own = list(_pools_of(node, partition))
            alike.setdefault(partition, []).append(tuple(range(len(pools), len(pools) + len(own))))
            pools += own
        groups += alike.values()
    return Pools(tuple(pools), tuple(_symmetries(groups, len(pools))))


def _pools_of(node: Node, partition: Partition) -> Iterator[Pool]:
    at = 0
    for tp in dict.fromkeys(partition):
        number = partition.count(tp)
        seats = tuple(node.devices[at + i * tp : at + (i + 1) * tp] for i in range(number))
        at += number * tp
        yield Pool(node.entry.device, tp, seats)


def _classes(cluster: Cluster) -> Iterator[list[Node]]:
    """Alike nodes, neighbours in the file only: rings visit nodes in its order."""
    members: list[Node] = []
    for node in cluster.nodes:
        if members and not _alike(cluster, members[0], node):
            yield members
            members = []
        members.append(node)
    yield members


def _alike(cluster: Cluster, a: Node, b: Node) -> bool:
    """Whether swapping two nodes changes nothing."""
    if _hardware(a) != _hardware(b):
        return False
    return all(
        _link(cluster, a.name, c.name) == _link(cluster, b.name, c.name)
        for c in cluster.nodes
        if c.name not in (a.name, b.name)
    )


def _hardware(node: Node) -> tuple[object, ...]:
    entry = node.entry
    return entry.device, entry.gpus, entry.intra_GBps, entry.memory_GiB, entry.price_per_hour


def _link(cluster: Cluster, a: str, b: str) -> tuple[float, float | None]:
    link = cluster.link(a, b)
    return link.inter_GBps, link.latency_us


def _symmetries(groups: Sequence[Sequence[tuple[int, ...]]], size: int) -> Iterator[tuple[int, ...]]:
    """Every combination of permutations of whole nodes inside the groups, as one permutation of all pools."""
    for chosen in product(*(permutations(group) for group in groups)):
        image = list(range(size))
        for group, order in zip(groups, chosen, strict=True):
            for own, other in zip(group, order, strict=True):
                for a, b in zip(own, other, strict=True):
                    image[a] = b
        yield tuple(image)
