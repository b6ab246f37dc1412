"""What a rival planner looks up of a request: types by speed, tensor-parallel groups, prefix sums, memory."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import GB, Bytes, Seconds

from ..cost.memory import stage_memory
from ..cuts import Table
from ..request import Request
from .rough_cuts import runs_of

Seat = tuple[str, ...]
"""The devices of one replica: its tensor-parallel group."""
Prefix = NDArray[np.float64]
"""Sums over blocks, from none to all."""

OWN_SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)
"""What the published planners know, in the order of their liking."""


class Site:
    """One request as a rival sees it; every look-up is made once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_blocks = len(request.model.blocks)
        self.beyond: NotMeasuredError | None = None
        """The first thing that a strategy would have tried, that was not measured and might have fitted."""
        self._seconds: dict[tuple[str, int, int], tuple[Prefix, Prefix] | None] = {}
        self._reach: dict[tuple[str, int, int, int, bool, int], list[int]] = {}
        self._runs: dict[tuple[str, int, int, bool], Table | None] = {}
        self._prefix: dict[tuple[str, int, int, bool], list[float] | None] = {}

    @cached_property
    def schedules(self) -> tuple[ScheduleKind, ...]:
        """Of the request's schedules, those that the published planners know."""
        return tuple(kind for kind in OWN_SCHEDULES if kind in self.request.schedules)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every block."""
        return tuple(block.kind for block in self.request.model.blocks)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Device types, fastest first; ties in the order of the cluster file."""
        names = tuple(dict.fromkeys(entry.device for entry in self.request.cluster.node))
        return tuple(sorted(names, key=self.pace_s))

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """TP degrees that any type was measured for and that any of its nodes can hold, ascending."""
        found = {tp for t in self.types for tp in self.degrees_of(t)}
        return tuple(sorted(found))

    def degrees_of(self, device: str) -> tuple[int, ...]:
        """TP degrees of a type, ascending."""
        return tuple(tp for tp in self.request.tables.tp_degrees(device) if self.capacity(device, tp))

    def capacity(self, device: str, tp: int) -> int:
        """Tensor-parallel groups that the nodes of a type hold."""
        entries = self.request.cluster.node
        return sum(entry.count * (entry.gpus // tp) for entry in entries if entry.device == device)

    def pace_s(self, device: str) -> Seconds:
        """Device seconds of a sample of the whole model at its best share; ``inf`` where not measured."""
        paces = [
            self.whole_s(device, tp, n) * tp / n
            for tp in self.degrees_of(device)
            for n in self.sizes(device, tp)
        ]
        return min(paces, default=float("inf"))

    def sizes(self, device: str, tp: int) -> list[int]:
        """Shares worth a try: powers of two within what was measured and what is allowed."""
        low, high = self.request.tables.samples_range(device, tp) or (1, 0)
        high = min(high, self.request.most_micro_batch)
        return [1 << k for k in range(high.bit_length()) if low <= 1 << k <= high]

    def whole_s(self, device: str, tp: int, samples: int) -> Seconds:
        """Seconds of all blocks; ``inf`` where they were not measured."""
        found = self.prefix(device, tp, samples)
        return float("inf") if found is None else found[-1]

    def seconds(self, device: str, tp: int, samples: int) -> tuple[Prefix, Prefix] | None:
        """Prefix sums of forward and backward seconds, or None where they were not measured."""
        key = device, tp, samples
        if key not in self._seconds:
            try:
                costs = self.request.tables.costs(device, tp, samples)
                self._seconds[key] = np.asarray(costs.forward_s, float), np.asarray(costs.backward_s, float)
            except NotMeasuredError as error:
                measured = self.request.tables.samples_range(device, tp)
                if (
                    measured is None or samples < measured[0]
                ):  # a larger share than measured needs more memory
                    self.beyond = self.beyond or error
                self._seconds[key] = None
        return self._seconds[key]

    def prefix(self, device: str, tp: int, samples: int, recompute: bool = False) -> list[float] | None:
        """Prefix sums of a micro-batch's seconds, forward and backward, as a list (for ``bisect``)."""
        key = device, tp, samples, recompute
        if key not in self._prefix:
            found = self.seconds(device, tp, samples)
            self._prefix[key] = (
                None if found is None else (found[0] * (2 if recompute else 1) + found[1]).tolist()
            )
        return self._prefix[key]

    def runs(self, device: str, tp: int, samples: int, recompute: bool) -> Table | None:
        """Seconds of every run of blocks, or None where they were not measured."""
        key = device, tp, samples, recompute
        if key not in self._runs:
            prefix = self.prefix(*key)
            self._runs[key] = None if prefix is None else runs_of(prefix)
        return self._runs[key]

    @cached_property
    def _room(self) -> dict[str, Bytes]:
        """Memory of the smallest device of each type without its reserve."""
        room: dict[str, Bytes] = {}
        for node in self.request.fleet.nodes.values():
            here = node.memory_bytes - node.device.reserve_bytes
            room[node.device.name] = min(here, room.get(node.device.name, here))
        return room

    def room_bytes(self, device: str) -> Bytes:
        """Memory of the smallest device of a type without its reserve."""
        return self._room[device]

    @cached_property
    def num_experts(self) -> int:
        """Routed experts of a block, of the block that has most; 0 for a dense model."""
        return max(block.experts for block in self.request.model.blocks)

    def reach(
        self, device: str, tp: int, samples: int, held: int, recompute: bool, tile: int | None = None
    ) -> list[int]:
        """By first block: the furthest end (exclusive) of a run that fits; the block itself where none.

        ``tile``: devices that divide the experts among them; None: the tensor-parallel group.
        """
        key = device, tp, samples, held, recompute, (tile or tp) if self.num_experts else 1
        found = self._reach.get(key)
        if found is None:
            found = self._reach[key] = self._make_reach(*key)
        return found

    def _make_reach(
        self, device: str, tp: int, samples: int, held: int, recompute: bool, tile: int
    ) -> list[int]:
        at = np.arange(self.num_blocks)
        start, stop = at[:, None], at[None, :] + 1
        totals = stage_memory(
            self.request.tables,
            start=start,
            stop=np.maximum(stop, start + 1),
            device=device,
            tp=tp,
            samples=samples,
            held=held,
            recompute=recompute,
            expert_tensor=tile,
        ).totals
        fits: NDArray[Any] = (totals <= self.room_bytes(device)) | (stop <= start)
        beyond = np.where(fits.all(axis=1), self.num_blocks, fits.argmin(axis=1))
        return [int(end) for end in np.maximum(beyond, at)]

    def groups(self, tp: int, types: Iterable[str]) -> list[tuple[str, Seat]]:
        """Tensor-parallel groups, type by type, in the order of the file; what fills none stays out."""
        found = []
        for kind in types:
            for node in self.request.cluster.nodes:
                if node.entry.device == kind:
                    devices = node.devices
                    full = len(devices) // tp
                    found += [(kind, devices[g * tp : (g + 1) * tp]) for g in range(full)]
        return found

    @cached_property
    def widest_node(self) -> int:
        """Most devices of any node."""
        return max(entry.gpus for entry in self.request.cluster.node)

    @cached_property
    def inter_s_per_byte(self) -> Seconds:
        """Between nodes, of the general network."""
        return 1 / (self.request.cluster.network.inter_GBps * GB)

    def hop_s(self, samples: int) -> Seconds:
        """One boundary message between nodes."""
        widest = max(self.request.tables.output_bytes, default=0)
        return self.request.cluster.network.latency_us * 1e-6 + samples * widest * self.inter_s_per_byte

    def sync_s(self, start: int, stop: int, copies: int, rings: int = 1) -> Seconds:
        """A ring all-reduce of a run's gradients between nodes whose NIC ``rings`` of them share."""
        if copies < 2:
            return 0.0
        size = self.request.tables.parameters(start, stop) * self.request.model.bytes_per_parameter.gradient
        return 2 * (copies - 1) / copies * size * rings * self.inter_s_per_byte


class Supply:
    """Free devices by type and node, while a strategy hands them out."""

    def __init__(self, request: Request) -> None:
        self._free: dict[str, dict[str, list[str]]] = {}
        for node in request.cluster.nodes:
            self._free.setdefault(node.entry.device, {})[node.name] = list(node.devices)

    def take(self, device: str, tp: int) -> Seat | None:
        """A group of ``tp`` devices from the node that it fills best, or None where no node has as many."""
        nodes = self._free.get(device, {})
        name = min((n for n in nodes if len(nodes[n]) >= tp), key=lambda n: len(nodes[n]), default=None)
        if name is None:
            return None
        seat, nodes[name] = tuple(nodes[name][:tp]), nodes[name][tp:]
        if not nodes[name]:
            del nodes[name]
        return seat


def types_of(request: Request, seats: Sequence[Seat]) -> tuple[str, ...]:
    """Device type of each replica."""
    nodes = request.cluster.nodes_by_name
    return tuple(nodes[node_of(seat[0])].entry.device for seat in seats)
