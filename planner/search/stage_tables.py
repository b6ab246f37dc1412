"""What a stage costs for every run of blocks at once: seconds and memory as tables over (first block, end).

From the price's own figures (``planner.cost``), so that a bound made of them is a bound of the price.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.units import Bytes, Seconds

from ..cuts import Table
from ..request import Request
from .held import Held, Option


@dataclass(frozen=True, slots=True, order=True)
class Hardware:
    """What a replica's seconds and memory depend on."""

    device: str
    """Device type."""
    tp: int
    room_bytes: Bytes
    """Memory of a device without the reserve."""


Mix = tuple[tuple[Hardware, int], ...]
"""The replicas of a stage: how many of each hardware."""


def width_of(mix: Mix) -> int:
    """Number of replicas."""
    return sum(count for _, count in mix)


class StageTables:
    """Tables of one request, each made when first asked for.

    With ``floors`` every table is a lower bound over all shares, else it is the time of the even deal.
    """

    def __init__(self, request: Request, *, floors: bool) -> None:
        self.request = request
        self.floors = floors
        self.num_blocks = len(request.model.blocks)
        self._seconds: dict[tuple[Hardware, int], tuple[Table, Table]] = {}
        self._whole: dict[tuple[Hardware, int], Seconds] = {}
        self._tables = Held(request.tables)
        self._held: dict[tuple[Hardware, int, bool], NDArray[np.int64]] = {}
        self._times: dict[tuple[Hardware, int, int, bool], Table] = {}
        self._floors: dict[tuple[Hardware, int, int, int, bool], Table] = {}
        self._stages: dict[tuple[Mix, int, int], Table] = {}
        self._upper = np.triu(np.ones((self.num_blocks + 1, self.num_blocks + 1), bool), 1)

    def hardware(self, device: str, tp: int = 1) -> Hardware:
        """The hardware of a replica whose first device is ``device``."""
        node = self.request.fleet.node(node_of(device))
        return Hardware(node.device.name, tp, node.memory_bytes - node.device.reserve_bytes)

    def most_samples(self, hardware: Hardware) -> int:
        """Largest share that was measured, within the global batch; 0 where none was."""
        measured = self.request.tables.samples_range(hardware.device, hardware.tp)
        return min(measured[1], self.request.global_batch) if measured else 0

    def least_samples(self, hardware: Hardware) -> int:
        """Smallest share that was measured."""
        measured = self.request.tables.samples_range(hardware.device, hardware.tp)
        return measured[0] if measured else 1

    def seconds(self, hardware: Hardware, samples: int) -> tuple[Table, Table]:
        """Forward and backward seconds of every run for a replica's share; ``inf`` for no run."""
        key = hardware, samples
        found = self._seconds.get(key)
        if found is None:
            costs = self.request.tables.costs(hardware.device, hardware.tp, samples)
            found = self._seconds[key] = self._spread(costs.forward_s), self._spread(costs.backward_s)
        return found

    def whole_model_s(self, hardware: Hardware, samples: int) -> Seconds:
        """Seconds of all blocks on one replica, forward and backward; ``inf`` where it was not measured."""
        key = hardware, samples
        found = self._whole.get(key)
        if found is None:
            found = float("inf")
            if self.least_samples(hardware) <= samples <= self.most_samples(hardware):
                forward, backward = self.seconds(hardware, samples)
                found = float(forward[0, -1] + backward[0, -1])
            self._whole[key] = found
        return found

    def held(self, hardware: Hardware, samples: int, recompute: bool) -> NDArray[np.int64]:
        """Micro-batches of every run that a replica can keep in flight within its memory; 0 where none."""
        key = hardware, samples, recompute
        found = self._held.get(key)
        if found is None:
            (table,) = self._tables.most(
                (Option(recompute, 0),),
                device=hardware.device,
                tp=hardware.tp,
                samples=samples,
                room_bytes=hardware.room_bytes,
                width=1,
            )
            found = self._held[key] = table
        return found

    def times(self, hardware: Hardware, samples: int, held: int, recompute: bool) -> Table:
        """Seconds of a micro-batch, forward, backward and recomputation; ``inf`` where it does not fit."""
        key = hardware, samples, held, recompute
        found = self._times.get(key)
        if found is None:
            forward, backward = self.seconds(hardware, samples)
            whole = forward + backward + (forward if recompute else 0.0)
            fits = self.held(hardware, samples, recompute) >= held
            found = self._times[key] = np.where(fits, whole, np.inf)
        return found

    def stage(self, mix: Mix, micro_batch: int, held: int) -> Table:
        """Least seconds of a micro-batch over all shares, with recomputation or without, for every run."""
        key = mix, micro_batch, held
        found = self._stages.get(key)
        if found is None:
            found = self._shared(mix, micro_batch, held, False)
            if self._memory_binds(mix, micro_batch, held):
                found = np.minimum(found, self._shared(mix, micro_batch, held, True))
            self._stages[key] = found
        return found

    def _memory_binds(self, mix: Mix, micro_batch: int, held: int) -> bool:
        """Whether some share of some run does not fit without recomputation."""
        spare = micro_batch - width_of(mix) + 1
        most = [(hardware, min(spare, self.most_samples(hardware))) for hardware, _ in mix]
        return any(n and bool((self.held(h, n, False)[self._upper] < held).any()) for h, n in most)

    def _shared(self, mix: Mix, micro_batch: int, held: int, recompute: bool) -> Table:
        """Water-filling for every run: min over the split between groups of the slowest group."""
        behind = width_of(mix)
        options: dict[int, Table] = {}
        for k, (hardware, count) in enumerate(mix):
            behind -= count
            least = sum(c for _, c in mix[: k + 1])
            totals = range(least, micro_batch - behind + 1) if behind else [micro_batch]
            options = {
                total: _least(
                    np.maximum(options[n], self._group(hardware, count, total - n, held, recompute))
                    if k
                    else self._group(hardware, count, total, held, recompute)
                    for n in (options if k else [0])
                    if total - n >= count
                )
                for total in totals
            }
        return options[micro_batch]

    def _group(self, hardware: Hardware, count: int, samples: int, held: int, recompute: bool) -> Table:
        """Alike replicas, dealt evenly: no split of ``samples`` has a faster slowest replica."""
        least = -(-samples // count)
        return self.floor(hardware, least, samples - count + 1, held, recompute)

    def floor(self, hardware: Hardware, least: int, most: int, held: int, recompute: bool) -> Table:
        """Least seconds for any share from ``least`` to ``most``: measured times need not ascend."""
        measured = self.least_samples(hardware), self.most_samples(hardware)
        if self.floors:
            least, most = max(least, measured[0]), min(most, measured[1])
        else:
            most = least if measured[0] <= least <= measured[1] else 0
        key = hardware, least, most, held, recompute
        found = self._floors.get(key)
        if found is None:
            none = np.full((self.num_blocks + 1, self.num_blocks + 1), np.inf)
            found = none if least > most else self.times(hardware, least, held, recompute)
            if least < most:
                found = np.minimum(found, self.floor(hardware, least + 1, most, held, recompute))
            self._floors[key] = found
        return found

    def _spread(self, prefix: Sequence[float]) -> Table:
        sums = np.asarray(prefix, float)
        return np.where(self._upper, sums[None, :] - sums[:, None], np.inf)


def _least(tables: Iterable[Table]) -> Table:
    """Element-wise minimum."""
    return reduce(np.minimum, tables)
