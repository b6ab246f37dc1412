"""Why no plan fits: the leanest plan, the device that lacks most in it, the smallest change that helps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arachne_runtime.plan.cluster import node_of
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Bytes, format_bytes

from .cost import in_flight, stage_memory
from .cut import min_max_cut
from .request import Request

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
    for added in range(1, MOST_ADDED + 1):
        if leanest(request, request.cluster.devices, (best.device,) * added).over_bytes <= 0:
            plural = "" if added == 1 else "s"
            return f"{added} further {device} device{plural} would do, or {more}"
    return f"more devices of type {device} would not help: {more}, or smaller blocks"


def leanest(request: Request, devices: Sequence[str], added: Sequence[str] = ()) -> Shortage:
    """The least shortage over pipelines of one device a stage and one sample a micro-batch, recomputed.

    Devices as in the file, or the largest memory first (early stages hold more micro-batches); every depth.
    ``added``: further devices like the named ones.
    """
    everyone = [*devices, *added]
    largest = sorted(everyone, key=lambda d: -request.fleet.node(node_of(d)).memory_bytes)
    found = [
        shortage
        for order in (everyone, largest)
        for depth in range(1, min(len(order), len(request.model.blocks)) + 1)
        for kind in request.schedules
        if (shortage := _of_chain(request, order[:depth], kind)) is not None
    ]
    return min(found, key=lambda shortage: (shortage.over_bytes, shortage.depth))


def _of_chain(request: Request, devices: Sequence[str], kind: ScheduleKind) -> Shortage | None:
    needs = [_needs(request, devices, s, kind) for s in range(len(devices))]
    rooms = [request.fleet.node(node_of(d)).memory_bytes for d in devices]
    cut = min_max_cut([need - room for need, room in zip(needs, rooms, strict=True)])
    if cut is None:
        return None
    spans = list(zip(cut.bounds, cut.bounds[1:], strict=False))
    over = [float(need[a, b]) - room for need, room, (a, b) in zip(needs, rooms, spans, strict=True)]
    worst = int(np.argmax(over))
    return Shortage(
        int(over[worst]), int(needs[worst][spans[worst]]), worst, len(devices), devices[worst], spans[worst]
    )


def _needs(
    request: Request, devices: Sequence[str], stage: int, kind: ScheduleKind
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Bytes of every run of blocks on one device, the reserve included; ``inf`` for no run."""
    device = request.fleet.node(node_of(devices[stage])).device
    num_blocks = len(request.model.blocks)
    measured = request.tables.samples_range(device.name, 1)
    samples = measured[0] if measured else 1
    held = in_flight(kind, stage, len(devices), max(1, request.global_batch // samples))
    table = np.full((num_blocks + 1, num_blocks + 1), np.inf)
    for start in range(num_blocks):
        for stop in range(start + 1, num_blocks + 1):
            memory = [
                stage_memory(
                    request.tables,
                    start=start,
                    stop=stop,
                    device=device.name,
                    tp=1,
                    samples=samples,
                    held=held,
                    recompute=recompute,
                ).total
                for recompute in (False, True)
            ]
            table[start, stop] = min(memory) + device.reserve_bytes
    return table
