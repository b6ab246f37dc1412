"""Experts: how a stage's devices are tiled for them (EP x ETP x EDP), and what sending tokens to them takes.

The devices of a stage, by (replica, TP rank), are cut into groups of EP x ETP; ETP varies fastest, in one
node. Each group holds every expert once and exchanges the tokens of its own replicas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Stage
from arachne_runtime.units import Seconds

from .seats import Seat
from .tables import Tables


def expert_tilings(nodes: Sequence[str], experts: int) -> Iterator[tuple[int, int]]:
    """Every (EP, ETP) for a stage whose devices stand in these nodes, in order.

    EP divides the experts, EP x ETP the devices, and a group of ETP devices stays in a node.
    """
    count = len(nodes)
    for tensor in range(1, count + 1):
        if count % tensor or any(len(set(nodes[i : i + tensor])) > 1 for i in range(0, count, tensor)):
            continue
        for parallel in range(1, count // tensor + 1):
            if experts % parallel == 0 and (count // tensor) % parallel == 0:
                yield parallel, tensor


def groups_of(stage: Stage) -> list[int]:
    """For each replica the number of its group; replicas of a group run their micro-batches in step."""
    tile, found, before = stage.expert_parallel * stage.expert_tensor, [], 0
    numbers: dict[int, int] = {}
    for r, replica in enumerate(stage.replicas):
        first, last = before // tile, (before + len(replica.devices) - 1) // tile
        before += len(replica.devices)
        number = next((numbers[g] for g in range(first, last + 1) if g in numbers), r)
        numbers.update(dict.fromkeys(range(first, last + 1), number))
        found.append(number)
    return found


@dataclass(frozen=True, slots=True)
class _Peers:
    """Whom one device exchanges tokens with."""

    inside: int
    """EP peers in its own node, itself left out."""
    outside: int
    far: tuple[str, ...]
    """Nodes of the latter."""


def exchange_seconds(stage: Stage, seats: tuple[Seat, ...], tables: Tables) -> Seconds:
    """Seconds of the exchanges of one micro-batch in one direction, on the slowest of the stage's devices.

    Each block with experts sends every token to the ranks of its ``experts_per_token`` experts and takes it
    back: an all-to-all each over EP, and a gather or scatter over ETP; forward and backward alike.
    """
    if stage.expert_parallel * stage.expert_tensor == 1:
        return 0.0
    start, stop = stage.layers
    sizes: dict[int, int] = {}
    for size in tables.routed_bytes[start:stop]:
        if size:
            sizes[size] = sizes.get(size, 0) + 1
    homes = [node_of(device) for device in stage.devices]
    return sum(2 * count * _slowest(stage, seats, homes, size, tables) for size, count in sizes.items())


def _slowest(
    stage: Stage, seats: tuple[Seat, ...], homes: list[str], routed_bytes: int, tables: Tables
) -> Seconds:
    slowest, at = 0.0, 0
    known: dict[tuple[object, ...], Seconds] = {}
    for seat in seats:
        size = -(-seat.replica.share * routed_bytes // seat.tp)
        for _ in seat.replica.devices:
            peers = _peers(stage, homes, at)
            senders = homes.count(seat.node.name)
            key = seat.node.name, size, peers
            if key not in known:
                known[key] = _once(stage, seat.node.name, peers, size, senders, tables)
            slowest = max(slowest, known[key])
            at += 1
    return slowest


def _peers(stage: Stage, homes: list[str], at: int) -> _Peers:
    tensor, tile = stage.expert_tensor, stage.expert_parallel * stage.expert_tensor
    first = at - at % tile + at % tensor
    nodes = [homes[i] for i in range(first, first + tile, tensor)]
    inside = nodes.count(homes[at]) - 1
    far = tuple(dict.fromkeys(node for node in nodes if node != homes[at]))
    return _Peers(inside, len(nodes) - 1 - inside, far)


def _once(stage: Stage, home: str, peers: _Peers, size: int, senders: int, tables: Tables) -> Seconds:
    """One exchange of ``size`` bytes: a part to each peer, over the slowest link of each kind."""
    part = -(-size // stage.expert_parallel)
    inside = tables.fleet.link(home, home)
    seconds = inside.seconds(peers.inside * part) if peers.inside else 0.0
    if peers.outside:
        links = {id(link): link for link in (tables.fleet.link(home, node) for node in peers.far)}
        seconds += max(link.seconds(peers.outside * part, senders) for link in links.values())
    if stage.expert_tensor > 1:
        seconds += (stage.expert_tensor - 1) * inside.seconds(size)
    return seconds
