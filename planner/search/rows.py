"""Kinds of stages as rows of arrays: seconds of every run of blocks, and how far a run can go within memory.

A row is a replica's hardware with its share; many stages of many templates have the same one. All figures
are the price's own (``planner.cost``), for every run of blocks at once.
"""

import numpy as np
from numpy.typing import NDArray

from ..request import Request
from .batch import StagePlan
from .held import Held, Option
from .network import Network
from .supply import Supply

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Rows:
    """All kinds of stages that a search met, numbered in the order of meeting."""

    def __init__(self, request: Request, supply: Supply, network: Network) -> None:
        self.network = network
        self.request = request
        self.supply = supply
        self.num_blocks = len(request.model.blocks)
        self.options = tuple(Option(r, z) for r in (False, True) for z in range(request.max_zero + 1))
        devices = supply.num_devices
        self._ends = len(supply.pools), devices + 1, devices + 1, request.global_batch + 1, devices + 1
        """Beyond the largest pool, TP degree, tile, share and width: a stage's code counts in these."""
        self._by_code: dict[int, int] = {}
        self._keys: list[tuple[int, int, int, int, int]] = []
        self._forward: list[Floats] = []
        self._backward: list[Floats] = []
        self._stacked: tuple[Floats, Floats] | None = None
        self._tables = Held(request.tables)
        self._parts: dict[int, float] = {}
        self._bytes: dict[int, tuple[float, float, float]] = {}
        kinds = [block.kind for block in request.model.blocks]
        self.num_alike = max(map(kinds.count, kinds))
        """Blocks of the commonest kind."""
        self._held: dict[int, list[Ints]] = {}
        self._options: dict[tuple[StagePlan, int, int, int, int], Option | None] = {}
        self._most: dict[int, tuple[Ints, Ints]] = {}

    def of(self, pool: Ints, tp: Ints, share: Ints, width: Ints, tile: Ints) -> Ints:
        """Row of each stage, any shape; -1 where its share was not measured, or its width is 0.

        The width counts only where ZeRO may divide by it. ``tile``: devices that hold the experts once.
        """
        sharers = width if self.request.max_zero else np.minimum(width, 1)
        parts = pool, tp, tile, share, sharers
        there = width > 0
        for part, end in zip(parts, self._ends, strict=True):
            there = there & (part < end)
        code = np.where(there, np.ravel_multi_index(parts, self._ends, mode="clip"), -1)
        known, inverse = np.unique(code, return_inverse=True)
        rows = np.array([self._row(int(c)) for c in known], np.int64)
        found: Ints = rows[inverse.ravel()].reshape(code.shape)
        return found

    def _row(self, code: int) -> int:
        if code < 0:
            return -1
        found = self._by_code.get(code)
        if found is None:
            pool, tp, tile, share, width = (int(part) for part in np.unravel_index(code, self._ends))
            found = self._by_code[code] = self._add(pool, tp, share, width, tile)
        return found

    def _add(self, pool: int, tp: int, share: int, width: int, tile: int) -> int:
        device = self.supply.pools[pool].device
        measured = self.request.tables.samples_range(device, tp)
        if measured is None or not measured[0] <= share <= measured[1]:
            return -1
        costs = self.request.tables.costs(device, tp, share)
        self._keys.append((pool, tp, share, width, tile))
        exchange = self._exchanges(pool, tp, share, tile)
        self._forward.append(np.asarray(costs.forward_s, float) + exchange)
        self._backward.append(np.asarray(costs.backward_s, float) + exchange)
        self._stacked = None
        return len(self._keys) - 1

    def _exchanges(self, pool: int, tp: int, share: int, tile: int) -> Floats:
        """Prefix sums of the seconds of all-to-alls to the experts and back, in one direction."""
        routed = np.asarray(self.request.tables.routed_bytes, float) * share / tp
        near = min(tile, self.supply.pools[pool].node_size)
        inside = self.network.per_byte(pool, inside=True, senders=1) * (near - 1) / tile
        outside = self.network.per_byte(pool, inside=False, senders=near) * (tile - near) / tile
        return np.concatenate([[0.0], np.cumsum(2 * routed * (inside + outside))])

    @property
    def seconds(self) -> tuple[Floats, Floats]:
        """``[rows, blocks + 1]``: prefix sums of forward and of backward seconds."""
        if not self._keys:
            return (np.ones((1, self.num_blocks + 1)),) * 2
        if self._stacked is None:
            self._stacked = np.stack(self._forward), np.stack(self._backward)
        return self._stacked

    def whole_s(self, row: Ints) -> Floats:
        """Seconds of one micro-batch of the whole model on each row; of any row for row -1."""
        forward, backward = self.seconds
        at = np.maximum(row, 0)
        return np.asarray(forward[at, -1] + backward[at, -1])

    def whole_fits(self, row: Ints) -> Floats:
        """Parts of the whole model that one stage of each row holds, if all blocks were alike; 0 for row -1.

        States of the parameters, and what one micro-batch keeps; ZeRO-1 where it may be.
        """
        return np.array([self._part(int(r)) if r >= 0 else 0.0 for r in row])

    def _part(self, row: int) -> float:
        found = self._parts.get(row)
        if found is None:
            states, kept, room = self._bytes_of(row)
            each = max(
                1.0, (states + kept) / self.num_alike
            )  # a model may have no parameters and keep nothing
            found = self._parts[row] = min(1.0, room // each / self.num_alike)
        return found

    def whole(self, row: Ints) -> tuple[Floats, Floats]:
        """Seconds of the whole model's forward and backward on each row; of any row for row -1."""
        forward, backward = self.seconds
        at = np.maximum(row, 0)
        return forward[at, -1], backward[at, -1]

    def whole_bytes(self, row: Ints) -> tuple[Floats, Floats, Floats]:
        """Of the whole model on each row: its states, what a micro-batch keeps, and the memory there is.

        As in ``whole_fits``; for row -1 1 each.
        """
        each = [self._bytes_of(int(r)) if r >= 0 else (1.0, 1.0, 1.0) for r in row]
        states, kept, room = np.array(each, float).reshape(-1, 3).T
        return np.maximum(1.0, states), kept, room

    def _bytes_of(self, row: int) -> tuple[float, float, float]:
        found = self._bytes.get(row)
        if found is None:
            pool, tp, share, width, tile = self._keys[row]
            tables, sizes = self.request.tables, self.request.model.bytes_per_parameter
            zero = bool(self.request.max_zero)
            experts = tables.expert_parameters[-1] / tile
            dense = (tables.parameters(0, self.num_blocks) - tables.expert_parameters[-1]) / tp
            kept = float(tables.activations(0, self.num_blocks, self.supply.pools[pool].device, tp, share))
            optimizer = (dense / width + experts / max(1, width * tp / tile)) if zero else dense + experts
            states = (dense + experts) * (sizes.weight + sizes.gradient) + optimizer * sizes.optimizer
            room = float(self.supply.pools[pool].room_bytes)
            found = self._bytes[row] = states, max(kept, optimizer * sizes.weight), room
        return found

    def held(self, row: int) -> list[Ints]:
        """By option, ``[start, stop]``: micro-batches that a replica can keep in flight, or 0."""
        found = self._held.get(row)
        if found is None:
            pool, tp, share, width, tile = self._keys[row]
            found = self._held[row] = self._tables.most(
                self.options,
                device=self.supply.pools[pool].device,
                tp=tp,
                samples=share,
                room_bytes=self.supply.pools[pool].room_bytes,
                width=width,
                tile=tile,
            )
        return found

    def reach(self, row: int, held: Ints) -> tuple[Ints, Ints]:
        """``[held, start]``: the last stop that fits, without and with recomputation.

        The start itself where nothing fits. ``held``: micro-batches in flight.
        """
        found = self._most.get(row)
        if found is None:
            tables = self.held(row)
            plain, again = (
                np.maximum.reduce([t for o, t in zip(self.options, tables, strict=True) if o.recompute is r])
                for r in (False, True)
            )
            found = self._most[row] = _not_rising(plain), _not_rising(again)
        return _last_stops(found[0], held), _last_stops(found[1], held)

    def option(self, stage: StagePlan, micro_batch: int, start: int, stop: int, held: int) -> Option | None:
        """The first option with which a stage fits; None where none does."""
        key = stage, -(-micro_batch // stage[2]), start, stop, held
        if key not in self._options:
            self._options[key] = self._option(*key)
        return self._options[key]

    def _option(self, stage: StagePlan, share: int, start: int, stop: int, held: int) -> Option | None:
        pool, tp, width, tile = stage
        row = int(self.of(*(np.array([x]) for x in (pool, tp, share, width, tile)))[0])
        if row < 0:
            return None
        tables = zip(self.options, self.held(row), strict=True)
        return next((option for option, table in tables if table[start, stop] >= held), None)


def _not_rising(table: Ints) -> Ints:
    """The largest value at each stop or behind it."""
    found: Ints = np.maximum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
    return found


def _last_stops(most: Ints, held: Ints) -> Ints:
    count = (most[None] >= held[:, None, None]).sum(axis=2)
    return np.asarray(np.where(count > 0, count - 1, np.arange(len(most))), np.int64)
