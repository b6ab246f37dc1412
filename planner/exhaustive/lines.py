"""Every way in which some devices can be one stage: replicas, their order and shares, and what that costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, permutations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import Replica

from ..cost.fleet import NodeFacts
from ..cost.memory import stage_memory
from ..cost.tables import Tables
from .pools import Pool, Vector

Unit = tuple[int, int, int]
"""A replica: (pool, TP degree, share)."""

Array = NDArray[np.float64]
"""By first block and end of a stage, blocks + 1 each."""

Grid = list[list[float]]
"""The same as lists, which are faster to read one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A stage's replicas in the order of their rows."""

    units: tuple[Unit, ...]
    width: int
    look: int
    """Equal for lines of the same hardware, TP degrees and shares: they cost the same by themselves."""
    first_image: bool
    """Whether it is not behind its mirror image."""
    palindrome: bool
    ascending: bool
    """Whether it is the first of all orders of its replicas."""
    per_byte: float
    """Seconds a byte, by the bandwidth of the slowest link among its replicas, of one message of a ring."""
    least_tp: int


@dataclass(frozen=True)
class Costs:
    """Forward and backward seconds of a micro-batch; inf where the stage does not fit."""

    slowest: Array
    """Both of the slowest replica."""
    lead: Array
    """The forward of the slowest replica; 0 where the stage does not fit."""
    forward: Array
    """The least of any replica, which every chain through the stage takes at least."""
    backward: Array
    recompute: NDArray[np.bool_]

    @cached_property
    def grids(self) -> tuple[Grid, Grid, Grid, Grid]:
        """Slowest, lead, forward and backward."""
        slowest, lead, forward, backward = (
            a.tolist() for a in (self.slowest, self.lead, self.forward, self.backward)
        )
        return slowest, lead, forward, backward


class Lines:
    """All lines of a request."""

    def __init__(self, tables: Tables, pools: tuple[Pool, ...]) -> None:
        self.tables = tables
        self.pools = pools
        self.nodes = [tables.fleet.node(node_of(pool.devices[0])) for pool in pools]
        self.num_blocks = tables.num_blocks
        self.spans = [(i, j) for i in range(self.num_blocks) for j in range(i + 1, self.num_blocks + 1)]
        self._hardware = [
            self.nodes.index(next(n for n in self.nodes if _alike(n, node))) for node in self.nodes
        ]
        self._lines: dict[tuple[Vector, int], list[Line]] = {}
        self._looks: dict[tuple[Unit, ...], int] = {}
        self._kinds: list[tuple[Unit, ...]] = []
        """By look; here a unit's pool is the first one of the same hardware."""
        self._costs: dict[tuple[int, int], Costs] = {}
        self._seconds: dict[tuple[Unit, int, bool], Array] = {}
        self._updates: dict[int, Array] = {}

    @cached_property
    def degrees(self) -> list[tuple[int, ...]]:
        """TP degrees of a replica on each pool: those that were measured and fit into a node."""
        return [
            tuple(tp for tp in self.tables.tp_degrees(node.device.name) if tp <= node.gpus)
            for node in self.nodes
        ]

    def lines(self, vector: Vector, micro_batch: int) -> list[Line]:
        """Every line of exactly these devices."""
        key = (vector, micro_batch)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = [
                line for replicas in self._shared(vector, micro_batch) for line in self._orders(replicas)
            ]
        return found

    def replicas(self, line: Line, used: list[int]) -> tuple[Replica, ...]:
        """On concrete devices: the next free ones of each pool; ``used`` is moved on."""
        found = []
        for pool, tp, share in line.units:
            first = used[pool]
            used[pool] += tp
            found.append(Replica(devices=self.pools[pool].devices[first : first + tp], share=share))
        return tuple(found)

    def costs(self, look: int, held: int) -> Costs:
        """Of a line with that look, with ``held`` micro-batches in flight."""
        key = (look, held)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._cost(self._kinds[look], held)
        return found

    def update(self, look: int) -> Array:
        """The slowest optimizer step of a line with that look."""
        found = self._updates.get(look)
        if found is None:
            found = self._updates[look] = np.zeros((self.num_blocks + 1,) * 2)
            for device, tp in sorted({(self.nodes[h].device.name, tp) for h, tp, _ in self._kinds[look]}):
                for i, j in self.spans:
                    found[i, j] = max(found[i, j], self.tables.update_seconds(i, j, device, tp))
        return found

    def _shared(self, vector: Vector, micro_batch: int) -> Iterator[tuple[Unit, ...]]:
        """Every multiset of replicas of these devices with shares."""
        found: dict[tuple[Unit, ...], None] = {}
        for groups in self._divisions(vector, micro_batch):
            ranges = [self._share_range(pool, tp) for pool, tp in groups]
            for shares in _compositions(micro_batch, len(groups)):
                if all(low <= n <= high for n, (low, high) in zip(shares, ranges, strict=True)):
                    found[tuple(sorted((*g, n) for g, n in zip(groups, shares, strict=True)))] = None
        yield from found

    def _divisions(self, vector: Vector, most: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Every way to part the devices into at most ``most`` replicas: (pool, TP degree)."""
        ways = [
            [tuple((p, tp) for tp in parts) for parts in _sums(n, self.degrees[p], most)]
            for p, n in enumerate(vector)
        ]
        for chosen in product(*ways):
            groups = tuple(g for part in chosen for g in part)
            if len(groups) <= most:
                yield groups

    def _share_range(self, pool: int, tp: int) -> tuple[int, int]:
        return self.tables.samples_range(self.nodes[pool].device.name, tp) or (1, 0)

    def _orders(self, replicas: tuple[Unit, ...]) -> Iterator[Line]:
        kinds = tuple(sorted({(self._hardware[p], tp, share) for p, tp, share in replicas}))
        look = self._looks.setdefault(kinds, len(self._looks))
        if look == len(self._kinds):
            self._kinds.append(kinds)
        per_byte = self._per_byte(replicas)
        for units in sorted(set(permutations(replicas))):
            mirror = units[::-1]
            yield Line(
                units=units,
                width=len(units),
                look=look,
                first_image=units <= mirror,
                palindrome=units == mirror,
                ascending=units == replicas,
                per_byte=per_byte,
                least_tp=min(tp for _, tp, _ in units),
            )

    def _per_byte(self, replicas: tuple[Unit, ...]) -> float:
        used = [0] * len(self.pools)
        names: list[str] = []
        for pool, tp, _ in replicas:
            names.append(node_of(self.pools[pool].devices[used[pool]]))
            used[pool] += tp
        return self.per_byte(names, max(tp for _, tp, _ in replicas))

    def per_byte(self, names: Sequence[str], most_tp: int) -> float:
        """Seconds a byte of the slowest link of a ring through replicas in these nodes.

        A NIC is shared by the ranks of a tensor-parallel group.
        """
        if len(names) == 1:
            return 0.0
        nodes = tuple(dict.fromkeys(names))
        links = self.tables.fleet.links_among(nodes, len(nodes) < len(names))
        return max(max(k.least_per_byte, k.seconds_per_byte * (most_tp if k.shared else 1)) for k in links)

    def _cost(self, kinds: tuple[Unit, ...], held: int) -> Costs:
        """Recomputed only where the stage does not fit without."""
        plain = np.stack([self._seconds_of(kind, held, False) for kind in kinds])
        again = np.stack([self._seconds_of(kind, held, True) for kind in kinds])
        fits = np.asarray(np.isfinite(plain).all(axis=(0, 1)))
        forward, backward = np.where(fits, plain, again).swapaxes(0, 1)
        both = forward + backward
        slowest = both.max(axis=0)
        possible = np.isfinite(slowest)
        lead = np.take_along_axis(forward, both.argmax(axis=0)[None], axis=0)[0]
        return Costs(
            slowest=slowest,
            lead=np.where(possible, lead, 0.0),
            forward=np.where(possible, forward.min(axis=0), inf),
            backward=np.where(possible, backward.min(axis=0), inf),
            recompute=np.logical_not(fits),
        )

    def _seconds_of(self, kind: Unit, held: int, recompute: bool) -> Array:
        """Forward and backward of one replica, by first block and end; inf where it does not fit."""
        key = (kind, held, recompute)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = np.full((2, self.num_blocks + 1, self.num_blocks + 1), inf)
            node, tp, share = self.nodes[kind[0]], kind[1], kind[2]
            name, room = node.device.name, node.memory_bytes - node.device.reserve_bytes
            start, stop = np.array(self.spans).T
            memory = stage_memory(
                self.tables,
                start=start,
                stop=stop,
                device=name,
                tp=tp,
                samples=share,
                held=held,
                recompute=recompute,
            )
            for i, j in np.array(self.spans)[memory.totals <= room].tolist():
                found[:, i, j] = self.tables.stage_seconds(i, j, name, tp, share, recompute)
        return found


def _alike(a: NodeFacts, b: NodeFacts) -> bool:
    return (a.device, a.memory_bytes) == (b.device, b.memory_bytes)


def _sums(total: int, parts: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """Every multiset of at most ``most`` of ``parts`` that adds up to ``total``."""
    if total == 0:
        return [()]
    return [
        (part, *rest)
        for i, part in enumerate(parts)
        if part <= total and most > 0
        for rest in _sums(total - part, parts[i:], most - 1)
    ]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``total`` as ``parts`` positive integers, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))
