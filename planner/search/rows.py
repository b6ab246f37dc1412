"""Kinds of stages as rows of arrays: seconds of every run of blocks, and how far a run can go within memory.

A row is a replica's hardware with its share; many stages of many templates have the same one. All figures
are the price's own (``planner.cost``), for every run of blocks at once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..request import Request
from .held import most_held
from .supply import Supply

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class Option:
    """What a stage may do to save memory, cheapest first."""

    recompute: bool
    zero: int


class Rows:
    """All kinds of stages that a search met, numbered in the order of meeting."""

    def __init__(self, request: Request, supply: Supply) -> None:
        self.request = request
        self.supply = supply
        self.num_blocks = len(request.model.blocks)
        self.options = tuple(Option(r, z) for r in (False, True) for z in range(request.max_zero + 1))
        self._by_code: dict[int, int] = {}
        self._keys: list[tuple[int, int, int, int]] = []
        self._forward: list[Floats] = []
        self._backward: list[Floats] = []
        self._stacked: tuple[Floats, Floats] | None = None
        self._held: dict[tuple[int, Option], Ints] = {}
        self._reach: dict[tuple[int, int], tuple[Ints, Ints]] = {}

    def of(self, pool: Ints, tp: Ints, share: Ints, width: Ints) -> Ints:
        """Row of each stage, any shape; -1 where its share was not measured, or its width is 0.

        The width counts only where ZeRO may divide by it.
        """
        sharers = width if self.request.max_zero else np.minimum(width, 1)
        code = ((pool * 4096 + tp) * 2**20 + share) * 2**20 + sharers
        code = np.where(width > 0, code, -1)
        known, inverse = np.unique(code, return_inverse=True)
        rows = np.array([self._row(int(c)) for c in known], np.int64)
        found: Ints = rows[inverse.ravel()].reshape(code.shape)
        return found

    def _row(self, code: int) -> int:
        if code < 0:
            return -1
        found = self._by_code.get(code)
        if found is None:
            rest, width = divmod(code, 2**20)
            rest, share = divmod(rest, 2**20)
            pool, tp = divmod(rest, 4096)
            found = self._by_code[code] = self._add(pool, tp, share, width)
        return found

    def _add(self, pool: int, tp: int, share: int, width: int) -> int:
        device = self.supply.pools[pool].device
        measured = self.request.tables.samples_range(device, tp)
        if measured is None or not measured[0] <= share <= measured[1]:
            return -1
        costs = self.request.tables.costs(device, tp, share)
        self._keys.append((pool, tp, share, width))
        self._forward.append(np.asarray(costs.forward_s, float))
        self._backward.append(np.asarray(costs.backward_s, float))
        self._stacked = None
        return len(self._keys) - 1

    @property
    def seconds(self) -> tuple[Floats, Floats]:
        """``[rows, blocks + 1]``: prefix sums of forward and of backward seconds."""
        if not self._keys:
            return (np.ones((1, self.num_blocks + 1)),) * 2
        if self._stacked is None:
            self._stacked = np.stack(self._forward), np.stack(self._backward)
        return self._stacked

    def held(self, row: int, option: Option) -> Ints:
        """``[start, stop]``: micro-batches of a run that a replica can keep in flight; 0 where none fits."""
        key = row, option
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._most_held(row, option)
        return found

    def _most_held(self, row: int, option: Option) -> Ints:
        pool, tp, share, width = self._keys[row]
        return most_held(
            self.request.tables,
            device=self.supply.pools[pool].device,
            tp=tp,
            samples=share,
            room_bytes=self.supply.pools[pool].room_bytes,
            recompute=option.recompute,
            zero=option.zero,
            width=width,
        )

    def reach(self, row: int, held: int) -> tuple[Ints, Ints]:
        """``[start]``: the last stop that fits with ``held`` in flight, without and with recomputation.

        The start itself where nothing fits.
        """
        key = row, held
        found = self._reach.get(key)
        if found is None:
            plain, again = (self._last_stop(row, held, recompute) for recompute in (False, True))
            found = self._reach[key] = plain, again
        return found

    def _last_stop(self, row: int, held: int, recompute: bool) -> Ints:
        starts = np.arange(self.num_blocks + 1)
        found = starts
        for option in self.options:
            if option.recompute is recompute:
                fits = self.held(row, option) >= held
                last = self.num_blocks - np.argmax(fits[:, ::-1], axis=1)
                found = np.maximum(found, np.where(fits.any(axis=1), last, starts))
        return found

    def option(
        self, stage: tuple[int, int, int], micro_batch: int, start: int, stop: int, held: int
    ) -> Option | None:
        """The first option with which a stage (pool, TP degree, width) fits; None where none does."""
        pool, tp, width = stage
        share = -(-micro_batch // width)
        row = int(self.of(*(np.array([x]) for x in (pool, tp, share, width)))[0])
        if row < 0:
            return None
        return next((o for o in self.options if self.held(row, o)[start, stop] >= held), None)
