"""What a change from the running plan to another one costs: bytes that must move, and the standstill."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Pipeline, Plan
from arachne_runtime.units import GB, Seconds

from ..request import Request

Floats = NDArray[np.float64]


class Role(NamedTuple):
    """What a device holds of a stage."""

    start: int
    stop: int
    """Blocks ``start..stop-1``."""
    shard: int
    of: int
    """Its part of each of them: which one of how many."""


Roles = Mapping[str, tuple[Role, ...]]
"""By device, one for each stage that it holds."""


def same_layout(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in nothing that a rank sees."""
    return a.pipelines == b.pipelines and a.schedule == b.schedule


def still_there(plan: Plan, request: Request) -> bool:
    """Whether every device of a plan is in the cluster."""
    there = set(request.cluster.devices)
    return all(device in there for device in plan.devices)


def change_factor(plan: Plan, request: Request) -> float:
    """By how much the change makes every iteration until the next one longer; 1 for the running plan."""
    if request.running is None or same_layout(plan, request.running):
        return 1.0
    return stretched(change_seconds(request.running, plan, request), request)


def stretched(standstill_s: Seconds, request: Request) -> float:
    """A horizon of H seconds of which C are lost: H / (H - C).

    Beyond half of it its tangent, so that plans stay ordered when all of them cost more than the horizon has.
    """
    lost = standstill_s / request.change_every_s
    return 1 / (1 - lost) if lost < 0.5 else 2 + 4 * (lost - 0.5)


def change_seconds(old: Plan, new: Plan, request: Request) -> Seconds:
    """The fixed pause, and the node that waits longest for its bytes: one NIC for what comes from others."""
    return migration(old, request).seconds(new)


class Migration:
    """Changes from one plan, to any other on the cluster of a request."""

    def __init__(self, old: tuple[Pipeline, ...], request: Request) -> None:
        self.request = request
        self.roles = roles_of(old)
        self.node_number = {node.name: n for n, node in enumerate(request.cluster.nodes)}
        sizes = request.model.bytes_per_parameter
        self.state_bytes: Floats = np.array(
            [block.parameters * (sizes.weight + sizes.optimizer) for block in request.model.blocks], float
        )
        """Of each block: weights and optimizer states; gradients are made anew."""
        self._bandwidth = np.array([_bandwidth(name, request) for name in self.node_number])
        self._missing: dict[tuple[int, int], Floats] = {}

    def seconds(self, new: Plan) -> Seconds:
        """The standstill of a change to ``new``."""
        slowest = float((self.entering(roles_of(new.pipelines)) / self._bandwidth).max())
        return self.request.migration_pause_s + slowest

    def entering(self, roles: Roles) -> Floats:
        """``[nodes]``: bytes that none of a node's devices holds yet."""
        found = np.zeros(len(self.node_number))
        for device, held in roles.items():
            node = self.node_number[node_of(device)]
            for role in held:
                missing = self.missing(role.shard, role.of)
                found[node] += missing[node, role.stop] - missing[node, role.start]
        return found

    def missing(self, shard: int, of: int) -> Floats:
        """``[nodes, blocks + 1]``: prefix sums of the bytes of this part of blocks that nodes do not hold."""
        key = shard, of
        if key not in self._missing:
            bytes_ = np.tile(self.state_bytes / of, (len(self.node_number), 1))
            for device, held in self.roles.items():
                node = self.node_number.get(node_of(device))
                for role in held if node is not None else ():
                    if (role.shard, role.of) == key:
                        bytes_[node, role.start : role.stop] = 0.0
            self._missing[key] = np.pad(np.cumsum(bytes_, axis=1), ((0, 0), (1, 0)))
        return self._missing[key]


def migration(old: Plan, request: Request) -> Migration:
    """Changes from ``old``."""
    return _migration(old.pipelines, request)


@lru_cache(maxsize=4)
def _migration(old: tuple[Pipeline, ...], request: Request) -> Migration:
    """Its tables are asked for again and again in a search."""
    return Migration(old, request)


def roles_of(pipelines: tuple[Pipeline, ...]) -> Roles:
    """What every device holds, in the order of the plan."""
    found: dict[str, tuple[Role, ...]] = {}
    for device, role in _each_role(pipelines):
        found[device] = (*found.get(device, ()), role)
    return found


def _each_role(pipelines: tuple[Pipeline, ...]) -> Iterator[tuple[str, Role]]:
    for pipeline in pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                for shard, device in enumerate(replica.devices):
                    yield device, Role(*stage.layers, shard, len(replica.devices))


def _bandwidth(node: str, request: Request) -> float:
    """Bytes a second into a node: the general network, or its slowest stated link where that is slower."""
    network = request.cluster.network
    places = {node, request.cluster.nodes_by_name[node].entry.name}
    stated = [pair.inter_GBps for pair in network.pair if places & set(pair.between)]
    return min([network.inter_GBps, *stated]) * GB
