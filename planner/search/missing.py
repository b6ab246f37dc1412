"""Why no plan fits: the stage that lacks memory in the leanest pipeline, the smallest changes that help."""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from msgspec.structs import replace as changed

from arachne_runtime.plan.cluster import Cluster, NodeEntry, node_of
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.profile import BlockTiming, Source
from arachne_runtime.plan.schedule import PRICEABLE
from arachne_runtime.units import Bytes, format_bytes

from ..request import MOST_ZERO, Request, with_cluster
from .enlarge import FEW_DEVICES, fresh_name
from .leanest import Leanest, Shortage

MOST_ADDED = 64
"""Further devices, or nodes of a large cluster, that are tried before giving up on more of them."""

MOST_TP = 8
"""Largest TP degree that is proposed: the usual node."""


class ChangeKind(StrEnum):
    """What could be changed."""

    SCHEDULE = "schedule"
    ZERO = "ZeRO"
    SHARE = "smaller micro-batch"
    TENSOR = "tensor parallelism"
    DEVICES = "more devices"
    MEMORY = "more memory"


class Change(Document, frozen=True, kw_only=True):
    """One change with which the leanest pipeline fits."""

    kind: ChangeKind
    amount: int
    """The ZeRO stage, samples, TP degree, number of devices, or bytes a device."""
    device: str | None = None
    """Device type of what is added."""
    text: str
    """For a person."""


class Missing(Document, frozen=True, kw_only=True):
    """What is missing where nothing fits."""

    device: str
    """The device that lacks most in the leanest pipeline."""
    device_type: str
    stage: int
    depth: int
    tp: int
    width: int
    blocks: tuple[int, int]
    needed_bytes: Bytes
    available_bytes: Bytes
    over_bytes: Bytes
    """Negative where the leanest pipeline fits, though the search found no plan."""
    changes: tuple[Change, ...]
    """Each is enough; those that cost no hardware first."""
    text: str
    """All of it for a person."""


def what_is_missing(request: Request) -> Missing:
    """Which memory, of which stage, by how much, and the smallest changes that would make a plan fit."""
    shortage = Leanest(request).shortage()
    changes = tuple(_changes(request, shortage)) if shortage.over_bytes > 0 else ()
    place = shortage.place
    reserve = _reserve_bytes(request, shortage)
    return Missing(
        device=place.first,
        device_type=place.device,
        stage=shortage.stage,
        depth=shortage.depth,
        tp=place.tp,
        width=place.width,
        blocks=shortage.blocks,
        needed_bytes=shortage.needed_bytes + reserve,
        available_bytes=place.room_bytes + reserve,
        over_bytes=shortage.over_bytes,
        changes=changes,
        text=_told(request, shortage, changes),
    )


def _told(request: Request, shortage: Shortage, changes: tuple[Change, ...]) -> str:
    model, devices = request.model.name, len(request.cluster.devices)
    plural = "s" if devices > 1 else ""
    leanest = _leanest_words(request, shortage)
    if shortage.over_bytes <= 0:
        return (
            f"no plan for {model} with a global batch of {request.global_batch} on {devices} "
            f"device{plural} was found, though the leanest ({leanest}) fits: give the search more time "
            f"(--time-budget; in Python time_budget_s or evaluations of find_plan){_wider(request)}"
        )
    first, stop = shortage.blocks
    blocks = f"block {first}" if stop == first + 1 else f"blocks {first} to {stop - 1}"
    place, reserve = shortage.place, _reserve_bytes(request, shortage)
    return (
        f"no plan fits {model} into the memory of {devices} device{plural}: the leanest ({leanest}) needs "
        f"{format_bytes(shortage.needed_bytes + reserve)} on {place.first} ({place.device}) for stage "
        f"{shortage.stage} ({blocks}), {format_bytes(shortage.over_bytes)} more than the "
        f"{format_bytes(place.room_bytes + reserve)} there; any of these would do: "
        + "; ".join(change.text for change in changes)
    )


def _wider(request: Request) -> str:
    """What a Request leaves out, which no option of the command line does."""
    left = [f"more schedules than {', '.join(request.schedules)}"]
    left = left if set(request.schedules) < set(PRICEABLE) else []
    if request.max_micro_batch is not None:
        left.append(f"a max_micro_batch above {request.max_micro_batch}")
    return f", or in Python a Request with {' or '.join(left)}" if left else ""


def _leanest_words(request: Request, shortage: Shortage) -> str:
    """``one pipeline of 4 stages, TP 2, the smallest micro-batches, recomputation``."""
    place = shortage.place
    words = [f"one pipeline of {shortage.depth} stage{'s' if shortage.depth > 1 else ''}"]
    if place.tp > 1:
        words.append(f"TP {place.tp}")
    if place.width > 1 and request.max_zero > 0:
        words.append(f"ZeRO {request.max_zero} over {place.width} replicas")
    if any(block.experts for block in request.model.blocks):
        words.append(f"experts spread over {Leanest(request).expert_parallel(place)} devices")
    return ", ".join([*words, "the smallest micro-batches", "recomputation"])


def _reserve_bytes(request: Request, shortage: Shortage) -> Bytes:
    """What the device type keeps for itself, which both figures hold for a reader."""
    return request.fleet.node(node_of(shortage.place.first)).device.reserve_bytes


def _changes(request: Request, shortage: Shortage) -> Iterator[Change]:
    for find in (_schedule, _zero, _share, _tensor):
        change = find(request)
        if change is not None:
            yield change
    for device in dict.fromkeys(entry.device for entry in request.cluster.node):
        change = _devices(request, device)
        if change is not None:
            yield change
    over = shortage.over_bytes
    text = f"{format_bytes(over)} more memory a device"
    yield Change(kind=ChangeKind.MEMORY, amount=over, text=text)


def _fits(request: Request) -> bool:
    return Leanest(request).fits()


def _schedule(request: Request) -> Change | None:
    """1F1B holds the fewest micro-batches."""
    least = ScheduleKind.ONE_F_ONE_B
    if least in request.schedules or not _fits(replace(request, schedules=(least,))):
        return None
    return Change(
        kind=ChangeKind.SCHEDULE, amount=1, text=f"in Python schedules=({least.value!r},) of the Request"
    )


def _zero(request: Request) -> Change | None:
    for stage in range(request.max_zero + 1, MOST_ZERO + 1):
        if _fits(replace(request, max_zero=stage)):
            return Change(
                kind=ChangeKind.ZERO, amount=stage, text=f"in Python max_zero={stage} of the Request"
            )
    return None


def _share(request: Request) -> Change | None:
    """One sample, where the profile starts with more: its bytes are known without measuring."""
    timings = request.profile.timings
    least = min(row.samples for row in timings)
    likes = [changed(row, samples=1) for row in timings if row.samples == least]
    if least == 1 or not _fits(_with_rows(request, likes)):
        return None
    text = f"micro-batches of 1 sample, of which nothing was measured (smallest: {least})"
    return Change(kind=ChangeKind.SHARE, amount=1, text=text)


def _tensor(request: Request) -> Change | None:
    """A degree that the profile does not have: its bytes are known without measuring."""
    timings = request.profile.timings
    most = min(MOST_TP, max(entry.gpus for entry in request.cluster.node))
    known = {row.tp for row in timings}
    for tp in (2**k for k in range(1, MOST_TP) if 2**k <= most):
        likes = [changed(row, tp=tp) for row in timings if row.tp == min(known)]
        if tp not in known and _fits(_with_rows(request, likes)):
            text = f"tensor parallelism of degree {tp}, of which nothing was measured"
            return Change(kind=ChangeKind.TENSOR, amount=tp, text=text)
    return None


def _with_rows(request: Request, likes: list[BlockTiming]) -> Request:
    """With further rows for their memory alone: the model's bytes, no measured ones."""
    bare = tuple(changed(row, activation_bytes=None, working=None, source=Source.ANALYTIC) for row in likes)
    profile = changed(request.profile, timings=(*request.profile.timings, *bare))
    return replace(request, profile=profile, running=None)


def _devices(request: Request, device: str) -> Change | None:
    """The fewest further devices of a type, or nodes of them in a large cluster."""
    cluster = request.cluster
    like = max((e for e in cluster.node if e.device == device), key=lambda e: e.gpus * e.count)
    gpus = 1 if len(cluster.devices) <= FEW_DEVICES else like.gpus

    def enough(count: int) -> bool:
        return _fits(with_cluster(request, _with_nodes(cluster, like, gpus, count)))

    if not enough(MOST_ADDED):
        return None
    low, high = 0, MOST_ADDED
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    added = high * gpus
    nodes = f" ({high} node{'s' if high > 1 else ''} of {gpus})" if gpus > 1 else ""
    text = f"{added} further {device} device{'s' if added > 1 else ''}{nodes}"
    return Change(kind=ChangeKind.DEVICES, amount=added, device=device, text=text)


def _with_nodes(cluster: Cluster, like: NodeEntry, gpus: int, count: int) -> Cluster:
    entry = changed(like, name=fresh_name(cluster, like), gpus=gpus, count=count)
    return changed(cluster, node=(*cluster.node, entry))
