"""Every replica of a plan in its node."""

from dataclasses import dataclass

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan, Replica

from .fleet import NodeFacts
from .tables import Tables


@dataclass(frozen=True, slots=True)
class Seat:
    """One replica in its node."""

    replica: Replica
    node: NodeFacts

    @property
    def tp(self) -> int:
        """Devices of its tensor-parallel group."""
        return len(self.replica.devices)


Seats = tuple[tuple[tuple[Seat, ...], ...], ...]
"""By pipeline, stage and replica."""


def seats_of(plan: Plan, tables: Tables) -> Seats:
    """Every replica with its node. Raises UsageError for a device that the cluster does not have."""
    return tuple(
        tuple(tuple(_seat(replica, tables) for replica in stage.replicas) for stage in pipeline.stages)
        for pipeline in plan.pipelines
    )


def _seat(replica: Replica, tables: Tables) -> Seat:
    node = tables.fleet.node(node_of(replica.devices[0]))
    for device in replica.devices:
        tables.fleet.check_device(device, node)
    return Seat(replica, node)
