"""Where this rank stands in a plan, and the process groups it needs; formed in one order on every rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, product

import torch
import torch.distributed as dist

from ..model.exchange import Peers
from ..model.experts import ExpertMesh
from ..plan.cluster import index_of
from ..plan.order import Reduction, Summed, ranks_of_stages, reductions
from ..plan.placement import Place, holding, places, places_of
from ..plan.plan import Plan
from ..plan.shards import Position, position_of
from ..plan.tiling import tiles
from ..plan.zero import zero_groups
from ..units import Seconds
from .transport import GlooTransport, NcclTransport, Transport


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's view of the plan: its place, its groups by members, and how it sends to other ranks."""

    places: tuple[Place, ...]
    """Of this rank, by stage."""
    device: torch.device
    reductions: tuple[Reduction, ...]
    """All reductions of the plan that this rank is a member of, those without another member too."""
    starts: frozenset[int]
    """Lowest block of each sum over more than one rank, of all ranks."""
    positions: dict[int, Position]
    """Where this rank stands along the axes that cut parameters, by the blocks that it holds."""
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    """Groups of more than one rank that this rank is in, by members; all ranks are the default group."""
    tensor: dict[int, Peers]
    """By stage, the devices of this rank's replica, for exchanges inside its blocks only."""
    experts: dict[int, ExpertMesh]
    """By stage, the devices with which this rank shares experts and tokens."""
    transport: Transport
    num_ranks: int

    @classmethod
    def form(
        cls,
        plan: Plan,
        summed: Summed,
        rank: int,
        device: torch.device,
        processes: Sequence[int] | None = None,
        *,
        timeout_s: Seconds | None = None,
    ) -> "Mesh":
        """Make every group on every rank, in ascending order of members, once for each distinct set.

        With a single rank no process group is needed, nor made.

        Args:
            plan: The plan.
            summed: Its model.
            rank: Of this process in the plan.
            device: Where it computes.
            processes: Number of each rank's process in the default group; default: that of the rank. A plan
                that takes the place of another may number the same devices otherwise.
            timeout_s: Of forming each group, and of what is done on it; default: that of the default group,
                where torch's own would be half an hour on gloo.

        """
        num_ranks = len(plan.devices)
        processes = processes or range(num_ranks)
        maker = _Maker.of(processes, device, timeout_s)
        sums = reductions(plan, summed)
        groups = _groups(chain((r.members for r in sums), zero_groups(plan)), rank, maker)
        mine = tuple(r for r in sums if rank in r.members)
        transport = _transport(plan, rank, device, maker)
        starts = frozenset(r.blocks[0] for r in sums if r.tie is None and len(r.members) > 1)
        positions = _positions(plan, rank)
        tensor = _tensor_peers(plan, rank, maker)
        experts = _expert_meshes(plan, rank, tensor, maker)
        mine_at = places_of(plan, rank)
        return cls(mine_at, device, mine, starts, positions, groups, tensor, experts, transport, num_ranks)

    def position_at(self, blocks: Iterable[int]) -> Position:
        """Where this rank stands in the stage that holds the first of ``blocks`` that are here."""
        return next(self.positions[block] for block in blocks if block in self.positions)

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.places[0].rank

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The default group, or None for a single rank."""
        return self.groups.get(tuple(range(self.num_ranks)))

    def every_group(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups that this rank communicates on, each once: the default one and those that were made."""
        inside = [peers for mesh in self.experts.values() for peers in (mesh.experts, mesh.tensor) if peers]
        found = chain(
            self.groups.values(),
            (peers.group for peers in (*self.tensor.values(), *inside)),
            self.transport.groups(),
        )
        return tuple(dict.fromkeys(found))

    def close(self) -> None:
        """Destroy the groups that were made, and forget all; the default one stays with whoever made it."""
        world = self.world
        for group in self.every_group():
            if group is not world:
                dist.destroy_process_group(group)
        for forgotten in (self.groups, self.tensor, self.experts):
            forgotten.clear()
        self.transport.close()


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes groups of the plan's ranks, all with one time limit."""

    processes: Sequence[int]
    """By rank, the number of its process in the default group."""
    timeout: timedelta | None
    """None only where there is no default group, hence a single rank."""

    @classmethod
    def of(cls, processes: Sequence[int], device: torch.device, timeout_s: Seconds | None) -> "_Maker":
        if timeout_s is not None:
            return cls(processes, timedelta(seconds=timeout_s))
        world = dist.group.WORLD
        return cls(processes, None if world is None else world._get_backend(device).options._timeout)

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """A group numbers its members by process, whatever their ranks."""
        made: dist.ProcessGroup = dist.new_group(
            [self.processes[rank] for rank in ranks], timeout=self.timeout
        )
        return made

    def peers(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> Peers:
        return Peers.of(group, [self.processes[rank] for rank in ranks])


def _tensor_peers(plan: Plan, rank: int, maker: _Maker) -> dict[int, Peers]:
    """Groups of their own, though sums of gradients may have the same members: those are issued between."""
    replicas = [(s, ranks) for (_, s), stage in ranks_of_stages(plan).items() for ranks in stage]
    members = _distinct(tuple(sorted(ranks)) for _, ranks in replicas)
    made = {ranks: maker.group(ranks) for ranks in members}
    mine = [(s, ranks) for s, ranks in replicas if rank in ranks and len(ranks) > 1]
    return {s: maker.peers(made[tuple(sorted(ranks))], ranks) for s, ranks in mine}


def _expert_meshes(
    plan: Plan, rank: int, tensor: Mapping[int, Peers], maker: _Maker
) -> dict[int, ExpertMesh]:
    """Groups of their own too, of the tiles of every stage; those of EP may span nodes."""
    ranks_of = {stage: tuple(chain(*ranks)) for stage, ranks in ranks_of_stages(plan).items()}
    tiles_of = {(p, s): tiles(plan.pipelines[p].stages[s]) for p, s in ranks_of}
    every = [
        tuple(ranks_of[stage][device] for device in devices)
        for stage, found in tiles_of.items()
        for tile in found
        for devices in (tile.experts, tile.tensors)
    ]
    made = {ranks: maker.group(ranks) for ranks in _distinct(tuple(sorted(r)) for r in every)}

    def peers(stage: tuple[int, int], devices: Sequence[int]) -> Peers | None:
        ranks = tuple(ranks_of[stage][device] for device in devices)
        return maker.peers(made[tuple(sorted(ranks))], ranks) if len(ranks) > 1 else None

    return {
        stage[1]: ExpertMesh(
            experts=peers(stage, tile.experts),
            tensor=peers(stage, tile.tensors),
            replica=tensor.get(stage[1]),
        )
        for stage, found in tiles_of.items()
        if rank in ranks_of[stage]
        for tile in [found[ranks_of[stage].index(rank)]]
    }


def _positions(plan: Plan, rank: int) -> dict[int, Position]:
    mine = (place for place in places(plan) if place.rank == rank)
    return {b: position_of(plan, place) for place in mine for b in holding(plan, place)[1].blocks}


def _groups(
    members: Iterable[tuple[int, ...]], rank: int, maker: _Maker
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    everyone = tuple(range(len(maker.processes)))
    if len(everyone) == 1:
        return {}
    made = {ranks: maker.group(ranks) for ranks in _distinct(members) if ranks != everyone}
    world = dist.group.WORLD
    assert world is not None
    return {everyone: world, **{ranks: group for ranks, group in made.items() if rank in ranks}}


def _distinct(members: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted({ranks for ranks in members if len(ranks) > 1})


def _transport(plan: Plan, rank: int, device: torch.device, maker: _Maker) -> Transport:
    if device.type != "cuda":
        return GlooTransport(maker.processes)
    return NcclTransport.form(_neighbours(plan), rank, device, maker.processes, maker.timeout)


def _neighbours(plan: Plan) -> Iterator[tuple[int, int]]:
    """All ordered pairs of ranks on two sides of a boundary: a short batch may need any of them.

    A rank that holds both sides hands over in memory.
    """
    ranks = ranks_of_stages(plan)
    for p, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages) - 1):
            for above, below in product(chain(*ranks[p, s]), chain(*ranks[p, s + 1])):
                if above != below:
                    yield above, below
                    yield below, above


def default_device(device: str) -> torch.device:
    """``v-0:1`` → ``cuda:1`` where the ranks speak NCCL (or one process has CUDA), else the CPU."""
    nccl = dist.get_backend() == "nccl" if dist.is_initialized() else True
    if nccl and torch.cuda.is_available():
        return torch.device("cuda", index_of(device))
    return torch.device("cpu")
