"""The cluster as it is with some of its nodes, and which nodes only their names tell apart."""

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace as changed

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster, NodeEntry, node_of
from arachne_runtime.plan.plan import Plan
from planner.request import Request
from planner.search.supply import likeness

Counts = tuple[int, ...]
"""Nodes of each kind."""


def node_by_node(cluster: Cluster) -> Cluster:
    """An entry for each node, so that any of them can be left out; links and kinds stay the same."""
    several = {entry.name for entry in cluster.node if entry.count > 1}
    named = {place for pair in cluster.network.pair for place in pair.between} & several
    zones = {entry.zone for entry in cluster.node}
    both = [e for e in cluster.node if e.name in named and (e.zone is not None or e.name in zones)]
    if both:
        raise UsageError(
            f"[[network.pair]] names {both[0].name!r}, {both[0].count} nodes that are in a zone too; a trace "
            f"takes them apart: name the zone instead, or the nodes one by one"
        )
    entries = [
        changed(
            node.entry,
            name=node.name,
            count=1,
            zone=node.entry.name if node.entry.name in named else node.entry.zone,
        )
        for node in cluster.nodes
    ]
    return changed(cluster, node=tuple(entries))


def with_nodes(cluster: Cluster, names: Iterable[str]) -> Cluster:
    """The cluster of a ``node_by_node`` with those alone; links to what is left out go too."""
    kept = frozenset(names)
    entries: list[NodeEntry] = [entry for entry in cluster.node if entry.name in kept]
    places = {place for entry in entries for place in (entry.name, entry.zone)}
    pairs = tuple(pair for pair in cluster.network.pair if set(pair.between) <= places)
    return changed(cluster, node=tuple(entries), network=changed(cluster.network, pair=pairs))


def kinds_of(request: Request) -> Mapping[str, int]:
    """By node: the number of its kind; alike nodes, of as many devices, are of one kind."""
    found: dict[object, int] = {}
    return {
        node.name: found.setdefault(
            (likeness(request.cluster, node, request.fleet.node(node.name)), node.entry.gpus), len(found)
        )
        for node in request.cluster.nodes
    }


def counted(names: Collection[str], kinds: Mapping[str, int]) -> Counts:
    """How many of each kind."""
    counts = [0] * (1 + max(kinds.values()))
    for name in names:
        counts[kinds[name]] += 1
    return tuple(counts)


def nodes_of(plan: Plan) -> frozenset[str]:
    """Names of the nodes that a plan uses."""
    return frozenset(map(node_of, plan.devices))


def moved_to(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan on other nodes: each of its own is renamed."""

    def on(device: str) -> str:
        node, colon, index = device.rpartition(":")
        return f"{names[node]}{colon}{index}"

    return changed(
        plan,
        pipelines=tuple(
            changed(
                pipeline,
                stages=tuple(
                    changed(
                        stage,
                        replicas=tuple(
                            changed(replica, devices=tuple(map(on, replica.devices)))
                            for replica in stage.replicas
                        ),
                    )
                    for stage in pipeline.stages
                ),
            )
            for pipeline in plan.pipelines
        ),
    )


def in_short(plan: Plan) -> str:
    """A plan in a few words: ``4 pipelines of 2 and 3 stages, 32 devices``."""
    depths = " and ".join(str(depth) for depth in sorted({len(p.stages) for p in plan.pipelines}))
    pipelines, one = len(plan.pipelines), depths == "1"
    of = f"pipeline{'s' if pipelines > 1 else ''} of {depths} stage{'' if one else 's'}"
    return f"{pipelines} {of}, {len(plan.devices)} devices"
