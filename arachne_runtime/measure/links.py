"""Times messages between ranks by size, for a pair alone and with all devices of a node sending.

Both ends of a pair send at the same time, as members of a ring and neighbours in a busy pipeline do. A link
that carries both directions at once takes no longer for it; ends that must compute to move bytes (gloo) do.
Each end waits for what it sent and what it received, so one clock sees the whole message.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.cluster import Cluster, node_of
from ..plan.limits import BUCKET_BYTES
from ..plan.model import ModelSpec
from ..plan.profile import LinkPoint, LinkScope, LinkTiming
from ..units import Bytes, Seconds
from .together import Together

DEFAULT_SIZES: tuple[Bytes, ...] = tuple(2**power for power in (10, 13, 16, 19, 22, 24, 26))
"""1, 8, 64, 512 KiB, 4, 16, 64 MiB: latency below, bandwidth above, lines between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEffort:
    """How long to measure one link."""

    batch_s: Seconds = 0.06
    """Messages of one size go back and forth about this long: 6 periods of a 10 ms quota."""
    batches: int = 5
    """The lower quartile of these counts: on a shared machine a few in a row may be ten times as long."""
    budget_s: Seconds = 2.5
    """Sizes between the smallest and the largest are left out once a link has taken this long."""


DEFAULT_LINK_EFFORT = LinkEffort()


@dataclass(frozen=True, slots=True)
class LinkTrial:
    """Disjoint pairs of ranks that exchange messages at the same time."""

    scope: LinkScope
    senders: int
    """Devices of a node that send at once."""
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's device, as far as links see it."""

    rank: int
    node: str
    type: str


def link_trials(cluster: Cluster, devices: Sequence[str]) -> tuple[LinkTrial, ...]:
    """What to measure: a pair alone for each two device types and scope, then all devices of a node at once.

    ``devices`` are the ranks' devices, by rank.
    """
    places = [_Place(r, node_of(d), cluster.device_type(d)) for r, d in enumerate(devices)]
    nodes: dict[str, list[_Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    at_once = [*_inside_nodes(nodes), *_between_nodes(nodes)]
    return (*_new_only(_alone(places)), *_new_only(at_once))


_Group = tuple[LinkScope, int, list[tuple[_Place, _Place]]]


def _alone(places: Sequence[_Place]) -> Iterator[_Group]:
    for a, b in combinations(places, 2):
        if a.node == b.node:
            yield LinkScope.INTRA, 2, [(a, b)]
        else:
            yield LinkScope.INTER, 1, [(a, b)]


def _inside_nodes(nodes: Mapping[str, list[_Place]]) -> Iterator[_Group]:
    """Rounds of a tournament in each node: all its devices busy, and every pair meets once."""
    for places in nodes.values():
        for pairs in _rounds(places) if len(places) > 2 else ():
            yield LinkScope.INTRA, 2 * len(pairs), pairs


def _between_nodes(nodes: Mapping[str, list[_Place]]) -> Iterator[_Group]:
    for ours, theirs in combinations(nodes.values(), 2):
        pairs = list(zip(ours, theirs, strict=False))
        if len(pairs) > 1:
            yield LinkScope.INTER, len(pairs), pairs


def _rounds(places: Sequence[_Place]) -> Iterator[list[tuple[_Place, _Place]]]:
    """Circle method: with an odd number one place rests in each round."""
    ring: list[_Place | None] = [*places, None] if len(places) % 2 else [*places]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        yield [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _new_only(groups: Iterable[_Group]) -> Iterator[LinkTrial]:
    """The groups that show two device types in a scope and number of senders for the first time."""
    seen: set[tuple[LinkScope, int, str, str]] = set()
    for scope, senders, pairs in groups:
        shown = {(scope, senders, *_types(a, b)) for a, b in pairs}
        if not shown <= seen:
            seen |= shown
            yield LinkTrial(scope, senders, tuple((a.rank, b.rank) for a, b in pairs))


def _types(a: _Place, b: _Place) -> tuple[str, str]:
    return (a.type, b.type) if a.type <= b.type else (b.type, a.type)


def sizes_for(model: ModelSpec, samples: int) -> tuple[Bytes, ...]:
    """The sizes up to the first that no message of a plan exceeds: a boundary's, or a bucket of gradients."""
    gradients = sum(block.parameters for block in model.blocks) * model.bytes_per_parameter.gradient
    crossing = samples * max(block.output_bytes for block in model.blocks)
    largest = max(crossing, min(gradients, BUCKET_BYTES))
    needed = sum(size < largest for size in DEFAULT_SIZES) + 1
    return DEFAULT_SIZES[: max(2, needed)]


def measure_links(
    cluster: Cluster,
    devices: Sequence[str],
    *,
    device: torch.device,
    together: Together,
    sizes: Sequence[Bytes] = DEFAULT_SIZES,
    effort: LinkEffort = DEFAULT_LINK_EFFORT,
    on_progress: Callable[[LinkTrial], None] | None = None,
) -> tuple[LinkTiming, ...]:
    """The links between all pairs of device types among ``devices`` (by rank), the same on every rank.

    Every rank of the default process group calls it; ``device`` is this rank's own.
    """
    found: dict[tuple[tuple[str, str], LinkScope, int], list[list[LinkPoint]]] = {}
    for trial in link_trials(cluster, devices):
        if on_progress:
            on_progress(trial)
        for (a, b), points in zip(trial.pairs, _measure(trial, device, together, sizes, effort), strict=True):
            types = sorted((cluster.device_type(devices[a]), cluster.device_type(devices[b])))
            found.setdefault(((types[0], types[1]), trial.scope, trial.senders), []).append(points)
    return tuple(
        LinkTiming(between=types, scope=scope, senders=senders, points=_mean(several))
        for (types, scope, senders), several in found.items()
    )


def _measure(
    trial: LinkTrial, device: torch.device, together: Together, sizes: Sequence[Bytes], effort: LinkEffort
) -> list[list[LinkPoint]]:
    """Points of every pair of the trial, known to all ranks."""
    points: list[list[LinkPoint]] = [[] for _ in trial.pairs]
    started = time.perf_counter()
    turns, before = [1] * len(trial.pairs), 0
    for size in _ends_first(sorted(sizes)):
        turns = [max(1, n * min(before, size) // size) for n in turns]  # as if only bandwidth counted
        turns, seconds = _seconds(trial, size, turns, device, together, effort)
        for of_pair, message_s in zip(points, seconds, strict=True):
            of_pair.append(LinkPoint(bytes=size, seconds=message_s))
        before = size
        if together.largest(time.perf_counter() - started) > effort.budget_s:
            break
    return [sorted(of_pair, key=lambda point: point.bytes) for of_pair in points]


def _ends_first(sizes: Sequence[Bytes]) -> list[Bytes]:
    """The smallest, the largest, then always the middle of the widest gap: what is left out lies between."""
    order = list(dict.fromkeys((0, len(sizes) - 1)))
    while len(order) < len(sizes):
        gaps = pairwise(sorted(order))
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
        order.append((low + high) // 2)
    return [sizes[index] for index in order]


def _seconds(
    trial: LinkTrial,
    size: Bytes,
    turns: list[int],
    device: torch.device,
    together: Together,
    effort: LinkEffort,
) -> tuple[list[int], list[Seconds]]:
    """Turns that lasted long enough, beginning with ``turns``, and seconds of a message, by pair."""
    mine = next((i for i, pair in enumerate(trial.pairs) if together.rank in pair), None)
    turn = _turn(trial, mine, size, device, together.rank)
    _spend(turn, 1, device)  # makes the connection
    batches: list[list[Seconds]] = []
    while len(batches) < effort.batches:
        together.barrier()
        took_s = together.largest_of(
            len(turns), mine, _spend(turn, turns[mine] if mine is not None else 0, device)
        )
        if batches or min(took_s) >= effort.batch_s / 2:
            batches.append([s / n for n, s in zip(turns, took_s, strict=True)])
        else:
            turns = [_more(n, s, effort.batch_s) for n, s in zip(turns, took_s, strict=True)]
    return turns, [_lower_quartile(of_pair) for of_pair in zip(*batches, strict=True)]


def _lower_quartile(values: Sequence[Seconds]) -> Seconds:
    return sorted(values)[len(values) // 4]


def _more(turns: int, took_s: Seconds, wanted_s: Seconds) -> int:
    """Turns that should last ``wanted_s``; at most eightfold, since a short try may have met no throttle."""
    return max(turns, min(8 * turns, round(turns * wanted_s / max(took_s, 1e-9))))


def _spend(turn: Callable[[], None], repeats: int, device: torch.device) -> Seconds:
    start = time.perf_counter()
    for _ in range(repeats):
        turn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _turn(
    trial: LinkTrial, mine: int | None, size: Bytes, device: torch.device, rank: int
) -> Callable[[], None]:
    """What this rank does once: a message to its partner and one from it; nothing where it is in no pair."""
    if mine is None:
        return lambda: None
    a, b = trial.pairs[mine]
    peer = b if rank == a else a
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = torch.zeros(size, dtype=torch.uint8, device=device)
    return lambda: _exchange(outgoing, incoming, peer)


def _exchange(outgoing: Tensor, incoming: Tensor, peer: int) -> None:
    # gloo tells the peer of a receive on the connection that data goes by: behind a message under way it
    # would hear of it, and send its own, only when all of that has left
    operations = [dist.P2POp(dist.irecv, incoming, peer), dist.P2POp(dist.isend, outgoing, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _mean(several: Sequence[Sequence[LinkPoint]]) -> tuple[LinkPoint, ...]:
    """The mean of several measurements of a link, over the sizes that all of them have."""
    return tuple(
        LinkPoint(bytes=points[0].bytes, seconds=sum(p.seconds for p in points) / len(points))
        for points in zip(*several, strict=False)
    )
