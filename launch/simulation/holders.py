"""Which state is left when nodes go: living holders of every block, else snapshots with a buddy node."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Bytes
from planner.request import Request
from planner.search.migrate import Role, roles_of

Part = tuple[int, int]
"""Of the state: a block, and which of its finest tensor-parallel parts."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who has which part of a job's state under a plan."""

    nodes: tuple[str, ...]
    """In the plan's order; each one's buddy, which has a copy of its last snapshot, is the next."""
    holders: Mapping[Part, frozenset[str]]
    most_bytes: float
    """State on the device that has most of it."""

    @property
    def exposed(self) -> frozenset[str]:
        """Nodes whose loss takes the only holder of some part."""
        return frozenset(node for held in self.holders.values() if len(held) == 1 for node in held)

    def are_alive(self, alive: Collection[str]) -> bool:
        """Whether every part has a holder among these nodes."""
        left = frozenset(alive)
        return all(left & held for held in self.holders.values())

    def are_copied(self, alive: Collection[str]) -> bool:
        """Whether every part has a holder or the buddy of one among these nodes."""
        left = frozenset(alive)
        copied = left | {node for node, buddy in self._buddies() if buddy in left}
        return all(copied & held for held in self.holders.values())

    def _buddies(self) -> Iterator[tuple[str, str]]:
        if len(self.nodes) > 1:
            yield from zip(self.nodes, (*self.nodes[1:], self.nodes[0]), strict=True)


@lru_cache(maxsize=256)
def holdings(plan: Plan, request: Request) -> Holdings:
    """Of the state that a plan without ZeRO spreads over the devices of a request's model."""
    state = _bytes_of_blocks(request)
    roles = roles_of(plan.pipelines)
    finest = [1] * len(state)
    for role in {role for held in roles.values() for role in held}:
        for block in range(role.start, role.stop):
            finest[block] = lcm(finest[block], role.of)
    holders: dict[Part, set[str]] = {}
    for device, held in roles.items():
        for part in _parts(held, finest):
            holders.setdefault(part, set()).add(node_of(device))
    return Holdings(
        nodes=tuple(dict.fromkeys(map(node_of, plan.devices))),
        holders={part: frozenset(nodes) for part, nodes in holders.items()},
        most_bytes=max(sum(state[b] / finest[b] for b, _ in _parts(held, finest)) for held in roles.values()),
    )


def _parts(held: Collection[Role], finest: list[int]) -> Iterator[Part]:
    for role in held:
        for block in range(role.start, role.stop):
            each = finest[block] // role.of
            yield from ((block, role.shard * each + number) for number in range(each))


def state_bytes(request: Request) -> Bytes:
    """Weights and optimizer states of the whole model."""
    return sum(_bytes_of_blocks(request))


def _bytes_of_blocks(request: Request) -> list[Bytes]:
    sizes = request.model.bytes_per_parameter
    return [block.parameters * (sizes.weight + sizes.optimizer) for block in request.model.blocks]
