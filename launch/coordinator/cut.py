"""A cluster cut to the devices that are there: what a planner that knows only whole nodes can plan for.

A node's devices are counted from 0 without gaps, in a cluster file, so what is left of a node gets a name of
its own; so does a node whose copies are fewer. Plans are translated there and back.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby, product
from typing import Protocol

import msgspec

from arachne_runtime.plan.cluster import Cluster, NetworkPair, Node, NodeEntry, index_of, node_of
from arachne_runtime.plan.plan import Plan, Replica


class Types(Protocol):
    """Which device type each device counts as, where that is another than its node's."""

    def type_of(self, name: str) -> str:
        """Of one device."""
        ...

    def described(self, entry: NodeEntry, type_: str) -> NodeEntry:
        """``entry`` as one of that type."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """What is there of a cluster."""

    cluster: Cluster
    names: Mapping[str, str]
    """Devices that are there to their names in ``cluster``."""
    whole: Cluster

    def there(self, plan: Plan) -> Plan:
        """A plan of the whole cluster in names of this one; devices that are gone get nodes that are too."""
        names = {device: self.names.get(device, f"gone.{device}") for device in plan.devices}
        types = {node_of(new): self.whole.device_type(old) for old, new in names.items() if self._has(old)}
        return _renamed(plan, names, types)

    def back(self, plan: Plan) -> Plan:
        """A plan of this cluster in the names of the whole one."""
        names = {name: device for device, name in self.names.items()}
        types = {node_of(names[d]): self.cluster.device_type(d) for d in plan.devices}
        return _renamed(plan, names, types)

    def devices_back(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Figures by device of this cluster, by device of the whole one."""
        names = {name: device for device, name in self.names.items()}
        return {names[name]: figure for name, figure in figures.items()}

    def _has(self, device: str) -> bool:
        return node_of(device) in self.whole.nodes_by_name


def cut(whole: Cluster, devices: Iterable[str], types: Types | None = None) -> Cut:
    """``whole`` with those ``devices`` alone; one that it does not know is left out.

    A node whose devices count as several ``types`` becomes several nodes.
    """
    there = frozenset(devices)
    parts = [part for node in whole.nodes for part in _parts(node, there, types)]
    entries, named = _entries(whole, parts, types)
    names = {device: f"{name}:{i}" for part, name in named for i, device in enumerate(part.devices)}
    pairs = tuple(_pairs(whole, named))
    network = msgspec.structs.replace(whole.network, pair=pairs)
    cluster = msgspec.structs.replace(whole, node=tuple(entries), network=network)
    return Cut(cluster, names, whole)


@dataclass(frozen=True, slots=True)
class _Part:
    """Alike devices of one node that are there."""

    node: Node
    type: str
    devices: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the node is missing or otherwise."""
        return self.devices == self.node.devices and self.type == self.node.entry.device


def _parts(node: Node, there: Set[str], types: Types | None) -> Iterator[_Part]:
    def counts_as(device: str) -> str:
        return types.type_of(device) if types is not None else node.entry.device

    left = sorted((d for d in node.devices if d in there), key=counts_as)
    for type_, devices in groupby(left, key=counts_as):
        yield _Part(node, type_, tuple(sorted(devices, key=index_of)))


def _entries(
    whole: Cluster, parts: list[_Part], types: Types | None
) -> tuple[list[NodeEntry], list[tuple[_Part, str]]]:
    """Entries of the cut cluster, and each part with the name of its node there."""
    taken = {node.name for node in whole.nodes} | {entry.name for entry in whole.node}
    entries: list[NodeEntry] = []
    named: list[tuple[_Part, str]] = []
    for entry in whole.node:
        mine = [part for part in parts if part.node.entry is entry]
        full = [part for part in mine if part.is_whole]
        if full:
            kept = msgspec.structs.replace(entry, count=len(full))
            entries.append(kept)
            nodes = Cluster(node=(kept,), network=whole.network).nodes
            named += [(part, node.name) for part, node in zip(full, nodes, strict=True)]
        for part in mine:
            if not part.is_whole:
                name = next(n for i in range(len(taken) + 1) if (n := f"{part.node.name}.{i}") not in taken)
                taken.add(name)
                own = entry if types is None else types.described(entry, part.type)
                entries.append(msgspec.structs.replace(own, name=name, count=1, gpus=len(part.devices)))
                named.append((part, name))
    return entries, named


def _pairs(whole: Cluster, named: list[tuple[_Part, str]]) -> Iterator[NetworkPair]:
    """The links that have something at both ends, those that name nodes first: the first of equals counts."""
    nodes = {node.name for node in whole.nodes}
    seen: set[tuple[str, ...]] = {(name, name) for _, name in named}  # a node is in no pair with itself
    for pair in sorted(whole.network.pair, key=lambda p: sum(end not in nodes for end in p.between)):
        for ends in product(*(_ends(whole, named, end) for end in pair.between)):
            key = tuple(sorted(ends))
            if key not in seen:
                seen.add(key)
                yield msgspec.structs.replace(pair, between=ends)


def _ends(whole: Cluster, named: list[tuple[_Part, str]], end: str) -> list[str]:
    """What a name of the whole cluster's network stands for in the cut one."""
    if end in whole.nodes_by_name:
        return [name for part, name in named if part.node.name == end]
    entries = {entry.name for entry in whole.node}
    if end not in entries:
        return [end] if any(part.node.entry.zone == end for part, _ in named) else []
    mine = [(part, name) for part, name in named if part.node.entry.name == end]
    whole_ones = [end] if any(part.is_whole for part, _ in mine) else []
    return [*whole_ones, *(name for part, name in mine if not part.is_whole)]


def _renamed(plan: Plan, names: Mapping[str, str], types: Mapping[str, str]) -> Plan:
    def replica(old: Replica) -> Replica:
        return msgspec.structs.replace(old, devices=tuple(names[device] for device in old.devices))

    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(
                msgspec.structs.replace(stage, replicas=tuple(map(replica, stage.replicas)))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    predicted, made_by = plan.predicted, plan.made_by
    if predicted is not None:
        peaks = {names[device]: peak for device, peak in predicted.peak_bytes.items()}
        predicted = msgspec.structs.replace(predicted, peak_bytes=peaks)
    if made_by is not None:
        made_by = msgspec.structs.replace(made_by, device_types=dict(types))
    return msgspec.structs.replace(plan, pipelines=pipelines, predicted=predicted, made_by=made_by)
