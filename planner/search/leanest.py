"""The pipeline that lacks least memory: what no plan can do without, and which stage lacks it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import Node
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Bytes

from ..cost import StageMemory, in_flight, stage_memory
from ..cost.amounts import Amount
from ..cuts import Table, min_max_cut
from ..request import Request

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
        self._by_place: dict[tuple[str, int, int], tuple[StageMemory, Amount]] = {}
        self._known: dict[tuple[str, int, int, int], Table] = {}
        self._fitting: dict[tuple[str, int, int, Bytes, int], NDArray[np.bool_]] = {}

    def shortage(self) -> Shortage:
        """The least there is over every order of nodes, TP degree, width, schedule and (some) depths."""
        found = (self._of(places, held) for places, held in self._pipelines())
        least = (shortage for shortage in found if shortage is not None)
        return min(least, key=lambda s: (s.over_bytes, s.depth, s.place.tp, s.place.width))

    def fits(self) -> bool:
        """Whether any of them has the memory; the first that does is enough."""
        return any(self._has_cut(places, held) for places, held in self._pipelines())

    def _pipelines(self) -> Iterator[tuple[Sequence[Place], list[int]]]:
        """Where the stages stand, and the micro-batches that each keeps in flight."""
        for chain in dict.fromkeys(chain for chain in self._chains() if chain):
            count = max(1, self.request.global_batch // chain[0].width)
            for depth in reversed(_depths(min(len(chain), len(self.request.model.blocks)))):
                for kind in self._kinds():
                    yield chain[:depth], [in_flight(kind, s, depth, count) for s in range(depth)]

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

    def _of(self, places: Sequence[Place], held: Sequence[int]) -> Shortage | None:
        needs = [self._needs(place, n) for place, n in zip(places, held, strict=True)]
        cut = min_max_cut([need - place.room_bytes for need, place in zip(needs, places, strict=True)])
        if cut is None:
            return None
        spans = list(pairwise(cut.bounds))
        over = [float(need[span]) - p.room_bytes for need, p, span in zip(needs, places, spans, strict=True)]
        worst = int(np.argmax(over))
        needed = int(needs[worst][spans[worst]])
        return Shortage(int(over[worst]), needed, worst, len(places), places[worst], spans[worst])

    def _has_cut(self, places: Sequence[Place], held: Sequence[int]) -> bool:
        """Whether the stages, one after the other, can own all blocks within their memory."""
        reached: NDArray[Any] = np.zeros(self._num_bounds, bool)
        reached[0] = True
        for place, n in zip(places, held, strict=True):
            reached = self._within(place, n)[reached].any(axis=0)
        return bool(reached[-1])

    def _within(self, place: Place, held: int) -> NDArray[np.bool_]:
        """Which runs of blocks fit."""
        key = place.device, place.tp, place.width, place.room_bytes, held
        if key not in self._fitting:
            self._fitting[key] = self._needs(place, held) <= place.room_bytes
        return self._fitting[key]

    def _needs(self, place: Place, held: int) -> Table:
        """Bytes of every run of blocks; ``inf`` for no run."""
        key = place.device, place.tp, place.width, held
        if key not in self._known:
            table = self._known[key] = np.full((self._num_bounds, self._num_bounds), np.inf)
            none, each = self._memory(place)
            both = replace(none, activations=none.activations + held * each).totals
            table[self._runs] = both.min(axis=0)  # the leaner way
        return self._known[key]

    @cached_property
    def _num_bounds(self) -> int:
        return len(self.request.model.blocks) + 1

    @cached_property
    def _runs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """First block and end of every run of blocks."""
        starts, stops = np.triu_indices(self._num_bounds, 1)
        return starts, stops

    def _memory(self, place: Place) -> tuple[StageMemory, Amount]:
        key = place.device, place.tp, place.width
        if key not in self._by_place:
            self._by_place[key] = self._run_memory(place)
        return self._by_place[key]

    def _run_memory(self, place: Place) -> tuple[StageMemory, Amount]:
        """Of every run of blocks with nothing in flight, and what each micro-batch in flight adds.

        ``[2, runs]``: without and with recomputation. Only activations are added.
        """
        measured = self.request.tables.samples_range(place.device, place.tp)
        starts, stops = self._runs
        none, one = (
            stage_memory(
                self.request.tables,
                start=starts,
                stop=stops,
                device=place.device,
                tp=place.tp,
                samples=measured[0] if measured else 1,
                held=held,
                recompute=np.array([[False], [True]]),
                zero=self.request.max_zero,
                width=place.width,
                expert_parallel=self.expert_parallel(place) if self._experts else 1,
            )
            for held in (0, 1)
        )
        return none, one.activations - none.activations


def _stages(groups: Sequence[Place], width: int) -> Iterator[Place]:
    """Neighbours that are alike, ``width`` at a time; what is left over has no stage."""
    for _, run in groupby(groups, key=lambda group: (group.device, group.tp, group.room_bytes)):
        members = list(run)
        for at in range(0, len(members) - width + 1, width):
            first = members[at]
            yield Place(first.device, first.first, first.tp, width, first.room_bytes)


def _depths(most: int) -> list[int]:
    return sorted({max(1, most * part // MOST_DEPTHS) for part in range(1, MOST_DEPTHS + 1)})
