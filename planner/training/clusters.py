"""Random clusters: device types of the catalog and of a continuous space, nodes of 1 to 8, links."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.units import GIB

from ..catalog import DeviceType, device, device_names
from ..catalog.devices import CPU, GPU_RESERVE_BYTES, NCCL_LATENCY_US, TERA
from .models import log_uniform

HELD_OUT_TYPES = ("L40S", "MI300X")
"""Device types that no training problem has, nor any made-up type like them: a card without NVLink whose
memory is slow beside its peak, and one with more memory than all others that are about as fast."""

TYPES = {1: 0.1, 2: 0.3, 3: 0.25, 4: 0.2, 5: 0.15}
"""Number of device types, with how often each is drawn."""
NODE_SIZES = {1: 0.2, 2: 0.15, 3: 0.04, 4: 0.3, 5: 0.03, 6: 0.04, 7: 0.02, 8: 0.22}
"""Devices of a node, with how often each is drawn."""
MIXED_SIZES = 0.4
"""Part of the device types with nodes of two sizes."""
FROM_CATALOG = 0.4
"""Part of the device types that are the catalog's, where one is near."""

PEAK_TFLOPS = (10.0, 2250.0)
"""16-bit peak, P100 to B200 (catalog)."""
SPREAD = 12.0
"""Fastest type of a cluster over the slowest, at the most: V100 to H100 is eight times."""
MEMORY_GIB = (8.0, 192.0)
"""RTX 2080 with 11 and MI300X with 192 are the ends of the catalog."""
FLOPS_PER_BYTE = (60.0, 450.0)
"""16-bit peak over memory bandwidth: P100 with 13 and L40S with 419 are the ends, most lie from 75 to 300."""
MEMORY_GBPS = (200.0, 8000.0)
"""To which the bandwidth of a made-up type's memory is cut, GB/s; 7,700 is the catalog's most."""
SINGLE_PART = (1 / 16, 1.0)
"""32-bit peak over the 16-bit one: A100 to P100."""
INTRA_GBPS = (8.0, 900.0)
"""PCIe 3.0 x8 to the fifth NVLink."""
INTER_GBPS = (1.0, 100.0)
"""A node's NICs: 10 Gbit/s of Ethernet to eight cards of 100 Gbit/s."""
LATENCY_US = (3.0, 100.0)
"""RDMA to TCP."""
WITHOUT_BFLOAT16 = 0.15
"""Part of the made-up types that compute bfloat16 as float32 does, as before Ampere."""
ZONED = 0.2
"""Part of the clusters of several entries whose nodes are in two zones."""
FASTER_AMONG = 0.25
"""Part of the clusters with one group of nodes that has a faster network of its own."""
ALIKE = 1.15
"""A made-up type within this factor of a held-out one in peak, memory and bandwidth is drawn again."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster and its device types, of which the planner may not know all by name."""

    cluster: Cluster
    types: tuple[DeviceType, ...]


def draw_cluster(rng: random.Random, devices: int, *, held_out: bool) -> Hardware:
    """A cluster of so many devices; ``held_out``: at least one is of a held-out type."""
    number = min(rng.choices(list(TYPES), list(TYPES.values()))[0], devices)
    types = _draw_types(rng, number, held_out)
    parts = _split(rng, devices, number)
    entries = [
        entry
        for kind, (known, part) in enumerate(zip(types, parts, strict=True))
        for entry in _entries(rng, kind, known, part)
    ]
    zoned = len(entries) > 1 and rng.random() < ZONED
    if zoned:
        zones = [*"xy", *rng.choices("xy", k=len(entries) - 2)]  # both are there
        rng.shuffle(zones)
        entries = [_in_zone(entry, zone) for entry, zone in zip(entries, zones, strict=True)]
    return Hardware(Cluster(node=tuple(entries), network=_network(rng, entries, zoned)), tuple(types))


def _draw_types(rng: random.Random, number: int, held_out: bool) -> list[DeviceType]:
    """Different ones, none much faster than another."""
    first = device(rng.choice(HELD_OUT_TYPES)) if held_out else None
    slowest = log_uniform(rng, PEAK_TFLOPS[0], PEAK_TFLOPS[1] / SPREAD)
    if first is not None:
        peak = _peak(first)
        slowest = log_uniform(rng, max(PEAK_TFLOPS[0], peak / SPREAD), min(peak, PEAK_TFLOPS[1] / SPREAD))
    near = [
        known
        for name in device_names()
        if not name.startswith(CPU) and slowest <= _peak(known := device(name)) <= slowest * SPREAD
    ]
    near = [known for known in near if known.name not in HELD_OUT_TYPES]
    rng.shuffle(near)
    found = [first] if first is not None else []
    while len(found) < number:
        if near and rng.random() < FROM_CATALOG:
            found.append(near.pop())
        else:
            found.append(_made_up(rng, f"made-{len(found)}", slowest))
    rng.shuffle(found)
    return [_with_link(rng, known) for known in found]


def _peak(known: DeviceType) -> float:
    """TFLOP/s in 16 bits."""
    return known.flops["float16"] / TERA


def _made_up(rng: random.Random, name: str, slowest: float) -> DeviceType:
    """A type that nobody sells, unlike the held-out ones."""
    while True:
        found = _continuous(rng, name, slowest)
        if not any(_alike(found, device(held)) for held in HELD_OUT_TYPES):
            return found


def _continuous(rng: random.Random, name: str, slowest: float) -> DeviceType:
    peak = log_uniform(rng, slowest, slowest * SPREAD)
    single = peak * log_uniform(rng, *SINGLE_PART)
    bandwidth = peak * 1e3 / log_uniform(rng, *FLOPS_PER_BYTE)
    flops = {"float32": single, "float16": peak}
    if rng.random() >= WITHOUT_BFLOAT16:
        flops |= {"tfloat32": max(single, peak / 2), "bfloat16": peak}
    return DeviceType(
        name=name,
        memory_bytes=int(log_uniform(rng, *MEMORY_GIB) * GIB),
        intra_GBps=log_uniform(rng, *INTRA_GBPS),
        intra_latency_us=NCCL_LATENCY_US,
        memory_GBps=min(max(bandwidth, MEMORY_GBPS[0]), MEMORY_GBPS[1]),
        reserve_bytes=GPU_RESERVE_BYTES,
        flops={dtype: rate * TERA for dtype, rate in flops.items()},
        node_size=8,
        source="made up",
    )


def _alike(a: DeviceType, b: DeviceType) -> bool:
    assert a.memory_GBps is not None
    assert b.memory_GBps is not None
    ratios = (_peak(a) / _peak(b), a.memory_bytes / b.memory_bytes, a.memory_GBps / b.memory_GBps)
    return all(1 / ALIKE < ratio < ALIKE for ratio in ratios)


def _with_link(rng: random.Random, known: DeviceType) -> DeviceType:
    """A third of the catalog's types on another link inside nodes than its usual one: PCIe, say."""
    if known.source == "made up" or rng.random() < 2 / 3:
        return known
    return replace(known, intra_GBps=log_uniform(rng, *INTRA_GBPS))


def _split(rng: random.Random, total: int, number: int) -> list[int]:
    """Devices of each type, at least one, from about even to very uneven."""
    weights = [rng.expovariate(1.0) + 0.1 for _ in range(number)]
    left = total - number
    parts = [1 + int(left * weight / sum(weights)) for weight in weights]
    parts[0] += total - sum(parts)
    return parts


def _entries(rng: random.Random, kind: int, known: DeviceType, devices: int) -> list[NodeEntry]:
    """Nodes of one or two sizes, and a smaller one of what is left."""
    sizes = rng.choices(list(NODE_SIZES), list(NODE_SIZES.values()), k=2 if rng.random() < MIXED_SIZES else 1)
    counts: dict[int, int] = {}
    left = devices
    for size in sizes[:-1]:
        number = int(left * rng.random() / size)
        counts[size] = counts.get(size, 0) + number
        left -= number * size
    number, rest = divmod(left, sizes[-1])
    counts[sizes[-1]] = counts.get(sizes[-1], 0) + number
    if rest:
        counts[rest] = counts.get(rest, 0) + 1
    return [
        NodeEntry(
            name=f"t{kind}-of-{size}",
            device=known.name,
            gpus=size,
            count=count,
            intra_GBps=known.intra_GBps,
            memory_GiB=known.memory_bytes / GIB,
        )
        for size, count in counts.items()
        if count
    ]


def _in_zone(entry: NodeEntry, zone: str) -> NodeEntry:
    return structs.replace(entry, zone=zone)


def _network(rng: random.Random, entries: Sequence[NodeEntry], zoned: bool) -> Network:
    """One bandwidth for all, slower between zones, sometimes faster among the nodes of one entry."""
    inter = log_uniform(rng, *INTER_GBPS)
    pairs = []
    if zoned:
        slower = max(INTER_GBPS[0] / 2, inter * log_uniform(rng, 0.05, 1.0))
        pairs.append(
            NetworkPair(between=("x", "y"), inter_GBps=slower, latency_us=log_uniform(rng, 20, 2000))
        )
    several = [entry.name for entry in entries if entry.count > 1]
    if several and rng.random() < FASTER_AMONG:
        name = rng.choice(several)
        faster = log_uniform(rng, inter, max(inter, INTRA_GBPS[1] / 2))
        pairs.append(NetworkPair(between=(name, name), inter_GBps=faster))
    return Network(inter_GBps=inter, latency_us=log_uniform(rng, *LATENCY_US), pair=tuple(pairs))
