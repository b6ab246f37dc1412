"""Rules of a cluster: names that mean one thing each, counts and bandwidths that can be."""

import re
from collections import Counter
from collections.abc import Callable, Iterator

from ...errors import Problem
from ..cluster import Cluster, NetworkPair
from ..walk import said
from .bounds import above_zero, at_least, not_negative

MAX_DEVICES = 2**20
"""A cluster beyond this is a slip of the pen; it is refused before its devices are listed."""
_NAME = re.compile(r"[^:\s]+")
_CURRENCY = re.compile(r"[A-Z]{3}")


def check_cluster(cluster: Cluster) -> tuple[Problem, ...]:
    """Every violation of every rule."""
    return tuple(problem for rule in CLUSTER_RULES for problem in rule(cluster))


def has_nodes(cluster: Cluster) -> Iterator[Problem]:
    """A cluster has a node."""
    if not cluster.node:
        yield Problem("$.node", "has no [[node]]")


def names_are_plain(cluster: Cluster) -> Iterator[Problem]:
    """A name stands before the colon of ``node:index``."""
    for n, node in enumerate(cluster.node):
        for field, name in (("name", node.name), ("zone", node.zone)):
            if name is not None and not (_NAME.fullmatch(name) and name.isprintable()):
                yield Problem(f"$.node[{n}].{field}", f"{said(name)} must be a name without ':' and spaces")


def device_types_are_named(cluster: Cluster) -> Iterator[Problem]:
    """A device type is a key of the catalog."""
    for n, node in enumerate(cluster.node):
        if not node.device.strip():
            yield Problem(f"$.node[{n}].device", "is empty; give a device type, like A100-40")


def counts_are_positive(cluster: Cluster) -> Iterator[Problem]:
    """An entry has nodes, and a node has devices."""
    for n, node in enumerate(cluster.node):
        yield from at_least(1, {f"$.node[{n}].gpus": node.gpus, f"$.node[{n}].count": node.count})


def devices_can_be_listed(cluster: Cluster) -> Iterator[Problem]:
    """A count with too many zeros is found here, before memory runs out."""
    total = _num_devices(cluster)
    if total > MAX_DEVICES:
        yield Problem("$.node", f"count x gpus give {total} devices; at most {MAX_DEVICES} are supported")


def entry_names_are_unique(cluster: Cluster) -> Iterator[Problem]:
    """A ``[[network.pair]]`` must know which entry it names."""
    first: dict[str, int] = {}
    for n, node in enumerate(cluster.node):
        if first.setdefault(node.name, n) != n:
            yield Problem(
                f"$.node[{n}].name", f"{node.name!r} is already the name of $.node[{first[node.name]}]"
            )


def node_names_are_unique(cluster: Cluster) -> Iterator[Problem]:
    """No two nodes have one name once ``count`` is expanded (``a`` twice gives ``a-0`` and ``a-1``)."""
    if not _can_be_listed(cluster):
        return
    repeated_entries = {name for name, count in Counter(n.name for n in cluster.node).items() if count > 1}
    owner: dict[str, str] = {}
    for node in cluster.nodes:
        other = owner.setdefault(node.name, node.entry.name)
        if other != node.entry.name and not {other, node.entry.name} & repeated_entries:
            message = f"[[node]] {other!r} and [[node]] {node.entry.name!r} both make a node {node.name!r}"
            yield Problem("$.node", message)


def zones_are_not_nodes(cluster: Cluster) -> Iterator[Problem]:
    """A name in a ``[[network.pair]]`` is a zone or a node, never both."""
    taken = _nodes_and_entries(cluster)
    for n, node in enumerate(cluster.node):
        if node.zone is not None and node.zone in taken:
            yield Problem(f"$.node[{n}].zone", f"{node.zone!r} is also the name of a node; rename one")


def bandwidths_are_positive(cluster: Cluster) -> Iterator[Problem]:
    """A link carries something."""
    speeds: dict[str, float | None] = {"$.network.inter_GBps": cluster.network.inter_GBps}
    for n, node in enumerate(cluster.node):
        speeds[f"$.node[{n}].intra_GBps"] = node.intra_GBps
    for path, pair in _pairs(cluster):
        speeds[f"{path}.inter_GBps"] = pair.inter_GBps
    yield from above_zero(speeds)


def memory_is_positive(cluster: Cluster) -> Iterator[Problem]:
    """A device has memory."""
    yield from above_zero({f"$.node[{n}].memory_GiB": node.memory_GiB for n, node in enumerate(cluster.node)})


def latencies_and_prices_are_not_negative(cluster: Cluster) -> Iterator[Problem]:
    """Both may be 0."""
    values: dict[str, float | None] = {"$.network.latency_us": cluster.network.latency_us}
    for n, node in enumerate(cluster.node):
        values[f"$.node[{n}].price_per_hour"] = node.price_per_hour
    for path, pair in _pairs(cluster):
        values[f"{path}.latency_us"] = pair.latency_us
        values[f"{path}.price_per_GB"] = pair.price_per_GB
    yield from not_negative(values)


def currency_is_a_code(cluster: Cluster) -> Iterator[Problem]:
    """It is printed behind every price."""
    if not _CURRENCY.fullmatch(cluster.currency):
        yield Problem(
            "$.currency", f"{said(cluster.currency)} must be three capital letters, like USD or EUR"
        )


def pairs_name_what_exists(cluster: Cluster) -> Iterator[Problem]:
    """A pair joins entries, nodes or zones of this file."""
    known = _nodes_and_entries(cluster) | {node.zone for node in cluster.node if node.zone}
    for path, pair in _pairs(cluster):
        for i, name in enumerate(pair.between):
            if name not in known:
                message = f"there is no node, [[node]] or zone {name!r}"
                yield Problem(f"{path}.between[{i}]", message)


def pairs_join_two_nodes(cluster: Cluster) -> Iterator[Problem]:
    """A pair of one node with itself joins nothing; inside a node ``intra_GBps`` counts."""
    singles = {node.name for node in cluster.nodes} if _can_be_listed(cluster) else set()
    for path, pair in _pairs(cluster):
        if pair.between[0] == pair.between[1] and pair.between[0] in singles:
            yield Problem(
                f"{path}.between", f"joins {pair.between[0]!r} with itself; set intra_GBps there instead"
            )


def pairs_are_given_once(cluster: Cluster) -> Iterator[Problem]:
    """Two pairs for the same places would contradict each other."""
    first: dict[tuple[str, ...], int] = {}
    for i, (path, pair) in enumerate(_pairs(cluster)):
        other = first.setdefault(tuple(sorted(pair.between)), i)
        if other != i:
            yield Problem(f"{path}.between", f"is already given by $.network.pair[{other}]")


CLUSTER_RULES: tuple[Callable[[Cluster], Iterator[Problem]], ...] = (
    has_nodes,
    names_are_plain,
    device_types_are_named,
    counts_are_positive,
    devices_can_be_listed,
    entry_names_are_unique,
    node_names_are_unique,
    zones_are_not_nodes,
    bandwidths_are_positive,
    memory_is_positive,
    latencies_and_prices_are_not_negative,
    currency_is_a_code,
    pairs_name_what_exists,
    pairs_join_two_nodes,
    pairs_are_given_once,
)


def _pairs(cluster: Cluster) -> Iterator[tuple[str, NetworkPair]]:
    for i, pair in enumerate(cluster.network.pair):
        yield f"$.network.pair[{i}]", pair


def _num_devices(cluster: Cluster) -> int:
    return sum(max(node.count, 0) * max(node.gpus, 1) for node in cluster.node)


def _can_be_listed(cluster: Cluster) -> bool:
    return _num_devices(cluster) <= MAX_DEVICES


def _nodes_and_entries(cluster: Cluster) -> set[str]:
    names = {node.name for node in cluster.node}
    return names | {node.name for node in cluster.nodes} if _can_be_listed(cluster) else names
