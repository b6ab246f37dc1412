"""The pipeline that lacks least memory: what no plan can do without, and which stage lacks it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import gcd

import numpy as np

from arachne_runtime.plan.cluster import Node
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Bytes

from ..cost import in_flight, stage_memory
from ..request import Request
from .cut import Table, min_max_cut

MOST_DEPTHS = 16
"""Depths that are tried of a long chain, the deepest among them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage may stand: a tensor-parallel group and its likes."""

    device: str
    """Device type."""
    first: str
    """Its first device."""
    tp: int
    width: int
    """Groups that share the stage, one sample each; more than one pays under ZeRO and with experts."""
    room_bytes: Bytes
    """Memory of a device without its reserve."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The stage that lacks most in the leanest pipeline."""

    over_bytes: Bytes
    """Missing; negative where the pipeline fits."""
    needed_bytes: Bytes
    stage: int
    depth: int
    place: Place
    blocks: tuple[int, int]


class Leanest:
    """Memory of the leanest pipelines of one request: least samples, recomputation where it helps."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._known: dict[tuple[str, int, int, int], Table] = {}

    def shortage(self) -> Shortage:
        """The least there is over every order of nodes, TP degree, width, schedule and (some) depths."""
        return min(self._shortages(), key=lambda s: (s.over_bytes, s.depth, s.place.tp, s.place.width))

    def fits(self) -> bool:
        """Whether any of them has the memory; the first that does is enough."""
        return any(shortage.over_bytes <= 0 for shortage in self._shortages())

    def _shortages(self) -> Iterator[Shortage]:
        for chain in dict.fromkeys(chain for chain in self._chains() if chain):
            for depth in reversed(_depths(min(len(chain), len(self.request.model.blocks)))):
                for kind in self._kinds():
                    shortage = self._of_chain(chain[:depth], kind)
                    if shortage is not None:
                        yield shortage

    def _chains(self) -> Iterator[tuple[Place, ...]]:
        fleet, tables = self.request.fleet, self.request.tables
        nodes = self.request.cluster.nodes
        largest = sorted(nodes, key=lambda node: -fleet.node(node.name).memory_bytes)
        degrees = {tp for n in fleet.nodes.values() for tp in tables.tp_degrees(n.device.name)}
        for order in (nodes, largest):
            for tp in sorted(degrees):
                groups = [group for node in order for group in self._groups(node, tp)]
                for width in self._widths(len(groups)):
                    yield tuple(_stages(groups, width))

    def _groups(self, node: Node, most_tp: int) -> Iterator[Place]:
        """The node's devices in groups of the largest measured degree up to ``most_tp``."""
        facts = self.request.fleet.node(node.name)
        degrees = [tp for tp in self.request.tables.tp_degrees(facts.device.name) if tp <= facts.gpus]
        if degrees:
            room = facts.memory_bytes - facts.device.reserve_bytes
            tp = max((d for d in degrees if d <= most_tp), default=degrees[0])
            for at in range(0, facts.gpus - tp + 1, tp):
                yield Place(facts.device.name, node.devices[at], tp, 1, room)

    def _widths(self, num_groups: int) -> list[int]:
        if self.request.max_zero == 0 and not self._experts:
            return [1]
        most = min(num_groups, self.request.most_micro_batch)
        powers = [2**k for k in range(most.bit_length()) if 2**k <= most]
        return sorted({*powers, most})

    @cached_property
    def _experts(self) -> int:
        """What expert parallelism must divide: the experts of every block that has some; 0 without any."""
        return gcd(*(block.experts for block in self.request.model.blocks))

    def expert_parallel(self, place: Place) -> int:
        """The widest spread of experts over a stage's devices."""
        count = place.tp * place.width
        return max(n for n in range(1, count + 1) if count % n == 0 and self._experts % n == 0)

    def _kinds(self) -> tuple[ScheduleKind, ...]:
        """The request's schedules; interleaved with one run of blocks, which holds least, is 1F1B."""
        plain = {ScheduleKind.INTERLEAVED: ScheduleKind.ONE_F_ONE_B}
        return tuple(dict.fromkeys(plain.get(kind, kind) for kind in self.request.schedules))

    def _of_chain(self, chain: Sequence[Place], kind: ScheduleKind) -> Shortage | None:
        count = max(1, self.request.global_batch // chain[0].width)
        held = [in_flight(kind, s, len(chain), count) for s in range(len(chain))]
        needs = [self._needs(place, n) for place, n in zip(chain, held, strict=True)]
        cut = min_max_cut([need - place.room_bytes for need, place in zip(needs, chain, strict=True)])
        if cut is None:
            return None
        spans = list(pairwise(cut.bounds))
        over = [float(need[span]) - p.room_bytes for need, p, span in zip(needs, chain, spans, strict=True)]
        worst = int(np.argmax(over))
        needed = int(needs[worst][spans[worst]])
        return Shortage(int(over[worst]), needed, worst, len(chain), chain[worst], spans[worst])

    def _needs(self, place: Place, held: int) -> Table:
        """Bytes of every run of blocks; ``inf`` for no run."""
        key = place.device, place.tp, place.width, held
        if key not in self._known:
            self._known[key] = self._run_bytes(place, held)
        return self._known[key]

    def _run_bytes(self, place: Place, held: int) -> Table:
        measured = self.request.tables.samples_range(place.device, place.tp)
        size = len(self.request.model.blocks) + 1
        starts, stops = np.triu_indices(size, 1)
        totals = [
            stage_memory(
                self.request.tables,
                start=starts,
                stop=stops,
                device=place.device,
                tp=place.tp,
                samples=measured[0] if measured else 1,
                held=held,
                recompute=recompute,
                zero=self.request.max_zero,
                width=place.width,
                expert_parallel=self.expert_parallel(place) if self._experts else 1,
            ).totals
            for recompute in (False, True)
        ]
        table = np.full((size, size), np.inf)
        table[starts, stops] = np.minimum(*totals)
        return table


def _stages(groups: Sequence[Place], width: int) -> Iterator[Place]:
    """Neighbours that are alike, ``width`` at a time; what is left over has no stage."""
    for _, run in groupby(groups, key=lambda group: (group.device, group.tp, group.room_bytes)):
        members = list(run)
        for at in range(0, len(members) - width + 1, width):
            first = members[at]
            yield Place(first.device, first.first, first.tp, width, first.room_bytes)


def _depths(most: int) -> list[int]:
    return sorted({max(1, most * part // MOST_DEPTHS) for part in range(1, MOST_DEPTHS + 1)})
