"""Why no plan fits: the leanest plan, the device that lacks most in it, the smallest change that helps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Bytes, format_bytes

from ..cost import in_flight, stage_memory
from ..request import Request
from .cut import Table, min_max_cut

MOST_ADDED = 64
"""Further devices that are tried before giving up on more of them."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The stage that lacks most in a plan."""

    over_bytes: Bytes
    """Missing, negative where the plan fits."""
    needed_bytes: Bytes
    stage: int
    depth: int
    device: str
    blocks: tuple[int, int]


def what_binds(request: Request, best: Shortage) -> str:
    """Which memory, on which stage, by how much, and what would help; ``best`` is the leanest plan."""
    node = request.cluster.nodes_by_name[node_of(best.device)]
    first, stop = best.blocks
    blocks = f"block {first}" if stop == first + 1 else f"blocks {first} to {stop - 1}"
    if best.over_bytes <= 0:
        return (
            f"no plan for {request.model.name} with a global batch of {request.global_batch} on "
            f"{len(request.cluster.devices)} devices was found, though the leanest one fits: give the search "
            f"more time, or allow more schedules ({', '.join(request.schedules)}) or a larger micro-batch"
        )
    return (
        f"no plan fits {request.model.name} into the memory of {len(request.cluster.devices)} devices: the "
        f"leanest (one pipeline of {best.depth} stages, micro-batches of one sample, recomputation) needs "
        f"{format_bytes(best.needed_bytes)} on {best.device} ({node.entry.device}) for stage {best.stage} "
        f"({blocks}), {format_bytes(best.over_bytes)} more than the "
        f"{format_bytes(best.needed_bytes - best.over_bytes)} there; "
        + _way_out(request, best, node.entry.device)
    )


def _way_out(request: Request, best: Shortage, device: str) -> str:
    more = f"{format_bytes(best.over_bytes)} more memory a device would do"
    needs = Needs(request)
    for added in range(1, MOST_ADDED + 1):
        if needs.leanest((best.device,) * added).over_bytes <= 0:
            plural = "" if added == 1 else "s"
            return f"{added} further {device} device{plural} would do, or {more}"
    return f"more devices of type {device} would not help: {more}, or smaller blocks"


class Needs:
    """Memory of the leanest plans of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tables: dict[tuple[str, int], Table] = {}

    def leanest(self, added: Sequence[str] = ()) -> Shortage:
        """The least shortage over pipelines of one device a stage, one sample a micro-batch, recomputed.

        Devices as in the file, or the largest memory first (early stages hold more); every depth.
        ``added``: further devices like the named ones.
        """
        fleet = self.request.fleet
        everyone = [*self.request.cluster.devices, *added]
        largest = sorted(everyone, key=lambda d: -fleet.node(node_of(d)).memory_bytes)
        found = [
            shortage
            for order in ([everyone] if largest == everyone else [everyone, largest])
            for depth in range(1, min(len(order), len(self.request.model.blocks)) + 1)
            for kind in self.request.schedules
            if (shortage := self._of_chain(order[:depth], kind)) is not None
        ]
        return min(found, key=lambda shortage: (shortage.over_bytes, shortage.depth))

    def _of_chain(self, devices: Sequence[str], kind: ScheduleKind) -> Shortage | None:
        needs = [self._table(devices, s, kind) for s in range(len(devices))]
        rooms = [self.request.fleet.node(node_of(d)).memory_bytes for d in devices]
        cut = min_max_cut([need - room for need, room in zip(needs, rooms, strict=True)])
        if cut is None:
            return None
        spans = list(pairwise(cut.bounds))
        over = [float(need[span]) - room for need, room, span in zip(needs, rooms, spans, strict=True)]
        worst = int(np.argmax(over))
        needed = int(needs[worst][spans[worst]])
        return Shortage(int(over[worst]), needed, worst, len(devices), devices[worst], spans[worst])

    def _table(self, devices: Sequence[str], stage: int, kind: ScheduleKind) -> Table:
        """Bytes of every run of blocks on one device, the reserve included; ``inf`` for no run."""
        device = self.request.fleet.node(node_of(devices[stage])).device
        measured = self.request.tables.samples_range(device.name, 1)
        samples = measured[0] if measured else 1
        held = in_flight(kind, stage, len(devices), max(1, self.request.global_batch // samples))
        key = device.name, held
        if key not in self._tables:
            self._tables[key] = self._run_bytes(device.name, samples, held) + device.reserve_bytes
        return self._tables[key]

    def _run_bytes(self, device: str, samples: int, held: int) -> Table:
        num_blocks = len(self.request.model.blocks)
        table = np.full((num_blocks + 1, num_blocks + 1), np.inf)
        for start, stop in combinations(range(num_blocks + 1), 2):
            table[start, stop] = min(
                stage_memory(
                    self.request.tables,
                    start=start,
                    stop=stop,
                    device=device,
                    tp=1,
                    samples=samples,
                    held=held,
                    recompute=recompute,
                ).total
                for recompute in (False, True)
            )
        return table
