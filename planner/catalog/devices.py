"""Device types by name: data-sheet figures, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from arachne_runtime.errors import UsageError
from arachne_runtime.units import GIB, Bytes, Seconds

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """What is known of a device type before anything is measured; None: not known."""

    name: str
    memory_bytes: Bytes
    intra_GBps: float
    """One direction between two devices of a node, 1e9 bytes a second."""
    intra_latency_us: float
    memory_GBps: float | None
    """Bandwidth of the device's memory; prices an optimizer step that was not measured."""
    reserve_bytes: Bytes
    """Memory that no plan may use: context, communication library, fragments of the allocator."""
    hop_busy_s: Seconds = 0.0
    """Seconds of computing that a message costs each end, beside its bytes; 0 where copies run alone."""
    hop_busy_s_per_byte: Seconds = 0.0
    price_per_hour: float | None = None
    """US dollars of one device for an hour: a list price, for where the cluster file gives none."""
    price_source: str = ""
    """Whose price list, and of when."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Dense FLOP/s by dtype, the data sheet's peak; what the device cannot compute in is missing."""
    node_size: int = 1
    """Devices of a usual node."""
    source: str


NCCL_LATENCY_US = 10.0
"""Latency of a send between two GPUs of a node; NCCL's documentation and tests show 5 to 15 µs."""

GPU_RESERVE_BYTES = 1 * GIB
"""CUDA context (about 0.5 GiB), NCCL's buffers, the allocator's fragments; not measured here."""

CPU_RESERVE_BYTES = 384 * 2**20
"""Resident size of a process that imported torch 2.13 and made a gloo group: 0.22 GiB on Linux, and some."""

_GPUS = (
    DeviceType(
        name="A100-40",
        memory_bytes=40536 * 2**20,
        intra_GBps=300.0,
        intra_latency_us=NCCL_LATENCY_US,
        memory_GBps=1555.0,
        reserve_bytes=GPU_RESERVE_BYTES,
        source="NVIDIA A100 data sheet (June 2021), SXM4 40 GB: NVLink 600 GB/s both ways, 1,555 GB/s; "
        "40,536 MiB as the driver reports them",
    ),
    DeviceType(
        name="V100-16",
        memory_bytes=16160 * 2**20,
        intra_GBps=150.0,
        intra_latency_us=NCCL_LATENCY_US,
        memory_GBps=900.0,
        reserve_bytes=GPU_RESERVE_BYTES,
        source="NVIDIA V100 data sheet (January 2020), SXM2 16 GB: NVLink 300 GB/s both ways, 900 GB/s; "
        "16,160 MiB as the driver reports them",
    ),
)

_BY_NAME = {device.name: device for device in _GPUS}


def device(name: str) -> DeviceType:
    """The device type called ``name``; UsageError, with the known ones, where there is none.

    ``cpu`` is one core; ``cpu-0.2`` a fifth of it (the lab's devices).
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    share = _cpu_share(name)
    if share is None:
        raise UsageError(f"no device type named {name!r}; known: {', '.join(device_names())}")
    return DeviceType(
        name=name,
        memory_bytes=2 * GIB,
        intra_GBps=1.0 * share,
        intra_latency_us=200.0 / share,
        memory_GBps=5.0 * share,
        reserve_bytes=CPU_RESERVE_BYTES,
        hop_busy_s=100e-6 / share,
        hop_busy_s_per_byte=0.25e-9 / share,
        source="two gloo ranks over loopback, this project's development machine, 2026-11-29: 64 bytes in "
        "0.22 ms, 4 MB in 3.3 ms; CPU time of each end 0.1 ms and 0.25 ns a byte; memory as a default",
    )


def device_names() -> tuple[str, ...]:
    """Every name that ``device`` knows."""
    return (*_BY_NAME, CPU, f"{CPU}-<share>")


def _cpu_share(name: str) -> float | None:
    if name == CPU:
        return 1.0
    prefix, _, text = name.partition("-")
    if prefix != CPU:
        return None
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share <= 1024 else None
