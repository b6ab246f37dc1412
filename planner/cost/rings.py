"""Rings: who sums or gathers the same parameters, and how long that takes over the links among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.limits import BUCKET_BYTES
from arachne_runtime.plan.plan import Stage
from arachne_runtime.units import Seconds

from .seats import Seat
from .tables import Tables, ring_seconds


@dataclass(frozen=True, slots=True)
class Ring:
    """Who takes part in a collective, as far as its seconds depend on it."""

    nodes: Mapping[str, int]
    """Members in each node."""
    size: int
    least_tp: int
    """The member with the fewest devices moves the largest shard."""
    most_tp: int
    """Devices of a member, or rings of shards, that send over one NIC at once."""

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> "Ring":
        """The replicas that hold some blocks; each tensor-parallel rank is in a ring of its own."""
        nodes: dict[str, int] = {}
        for seat in seats:
            nodes[seat.node.name] = nodes.get(seat.node.name, 0) + 1
        degrees = [seat.tp for seat in seats]
        return cls(nodes, len(seats), min(degrees), max(degrees))

    @classmethod
    def of_experts(cls, stages: Sequence[Stage]) -> "Ring":
        """The devices that hold the same experts: every (EP x ETP)-th of a stage; all rings run at once."""
        nodes: dict[str, int] = {}
        beside: dict[str, int] = {}
        for stage in stages:
            tile = stage.expert_parallel * stage.expert_tensor
            for device in stage.devices[::tile]:
                nodes[node_of(device)] = nodes.get(node_of(device), 0) + 1
            for device in stage.devices:
                beside[node_of(device)] = beside.get(node_of(device), 0) + 1
        rings = max(-(-beside[node] // count) for node, count in nodes.items())
        return cls(nodes, sum(nodes.values()), 1, rings)

    @classmethod
    def of_shards(cls, stages: Sequence[Sequence[Seat]]) -> "Ring":
        """Stages whose replicas hold a shard each (ZeRO-2): one ring for each shard, all at once."""
        firsts = cls.of([seats[0] for seats in stages])
        most = max(sum(s.tp for s in seats if s.node is seat.node) for seats in stages for seat in seats[:1])
        return cls(firsts.nodes, firsts.size, firsts.least_tp, most)

    def seconds(self, size: float, tables: Tables, senders: int = 1) -> Seconds:
        """An all-reduce of ``size`` bytes, in buckets; a gather, or a scatter of sums, takes half of it.

        The slowest link sets the pace: any of the ring's nodes may stand beside any other in it.
        """
        if self.size < 2 or size <= 0:
            return 0.0
        links = tables.fleet.links_among(tuple(self.nodes), max(self.nodes.values()) > 1)
        buckets = max(1, int(size) // BUCKET_BYTES)
        return buckets * max(
            ring_seconds(link, size / buckets, self.size, max(senders, self.most_tp) if link.shared else 1)
            for link in links
        )
