"""Which devices are alike: pools of interchangeable devices, and permutations of pools that change nothing.

Two devices of a node are alike, and so are two single-device nodes, neighbours in the
file, with the same hardware and the same links.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from arachne_runtime.plan.cluster import Cluster, Node

from ..counts import Counts


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of which any may stand for any other."""

    device: str
    """Device type."""
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pools:
    """All devices of a cluster, by pool, with the symmetries between pools."""

    pools: tuple[Pool, ...]
    symmetries: tuple[tuple[int, ...], ...]
    """Permutations of pool indices under which every price stays the same; the identity is one of them."""

    @property
    def counts(self) -> Counts:
        """Devices of each pool."""
        return tuple(len(pool.devices) for pool in self.pools)

    def canonical(self, packing: Sequence[Counts]) -> bool:
        """Whether this unordered list of vectors stands for all its images under the symmetries."""
        own = tuple(sorted(packing, reverse=True))
        return all(own >= self._image(packing, symmetry) for symmetry in self.symmetries)

    def _image(self, packing: Sequence[Counts], symmetry: tuple[int, ...]) -> tuple[Counts, ...]:
        return tuple(sorted((tuple(v[i] for i in symmetry) for v in packing), reverse=True))


def find_pools(cluster: Cluster) -> Pools:
    """The pools of a cluster, in the order of its file."""
    classes: list[list[Node]] = []
    for node in cluster.nodes:  # neighbours in the file only: rings visit nodes in its order
        if classes and _alike(cluster, classes[-1][0], node):
            classes[-1].append(node)
        else:
            classes.append([node])
    pools: list[Pool] = []
    groups: list[list[int]] = []
    for members in classes:
        device = members[0].entry.device
        if members[0].entry.gpus == 1:
            groups.append([len(pools)])
            pools.append(Pool(device, tuple(d for node in members for d in node.devices)))
        else:
            groups.append(list(range(len(pools), len(pools) + len(members))))
            pools += [Pool(device, node.devices) for node in members]
    return Pools(tuple(pools), tuple(_symmetries(groups)))


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


def _symmetries(groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Every combination of permutations inside the groups, as one permutation of all pools."""
    if not groups:
        yield ()
        return
    for head in permutations(groups[0]):
        for tail in _symmetries(groups[1:]):
            yield (*head, *tail)
