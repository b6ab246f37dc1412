"""Device types by name: data-sheet figures, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import msgspec

from arachne_runtime.plan.document import Document
from arachne_runtime.units import GIB, Bytes, Seconds

from .names import unknown

CPU = "cpu"
CURRENCY = "USD"
"""Of the list prices."""
TERA = 1e12
CORE_FLOPS = 50e9
"""FLOP/s of one core in float32: two 256-bit fused multiply-adds a clock at 3 GHz reach 96e9, and matrix
products of PyTorch about half; a guess, since machines differ: measure with `arachne profile`."""


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
    """Of the whole boundary tensor: packing, sharding and putting together."""
    hop_overlaps: bool = False
    """Whether an end computes while its message is on the link. GPUs: no, as the measured runs show (their
    sends and receives are kernels in the stream of the computation); a CPU's network stack: yes."""
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


class _Sheet(Document, frozen=True, kw_only=True):
    """An entry of devices.toml, which says what its fields are."""

    memory_MiB: int
    tflops: dict[str, float]
    memory_GBps: float
    intra_GBps: float
    node_size: int
    reserve_GiB: float | None = None
    hop_busy_ps_per_byte: float = 0.0
    price_per_hour: float | None = None
    price_source: str = ""
    source: str

    def device(self, name: str) -> DeviceType:
        return DeviceType(
            name=name,
            memory_bytes=self.memory_MiB * 2**20,
            intra_GBps=self.intra_GBps,
            intra_latency_us=NCCL_LATENCY_US,
            memory_GBps=self.memory_GBps,
            reserve_bytes=GPU_RESERVE_BYTES if self.reserve_GiB is None else int(self.reserve_GiB * GIB),
            hop_busy_s_per_byte=self.hop_busy_ps_per_byte * 1e-12,
            price_per_hour=self.price_per_hour,
            price_source=self.price_source,
            flops={dtype: rate * TERA for dtype, rate in self.tflops.items()},
            node_size=self.node_size,
            source=self.source,
        )


@cache
def _gpus() -> dict[str, DeviceType]:
    raw = (resources.files(__package__) / "devices.toml").read_bytes()
    sheets = msgspec.toml.decode(raw, type=dict[str, _Sheet])
    return {name: sheet.device(name) for name, sheet in sheets.items()}


def device(name: str) -> DeviceType:
    """The device type called ``name``; UsageError, with the known ones, where there is none.

    ``cpu`` is one core; ``cpu-0.2`` a fifth of it (the lab's devices).
    """
    found = _gpus().get(name)
    if found is not None:
        return found
    share = _cpu_share(name)
    if share is None:
        raise unknown("no device type", name, "known", device_names())
    return DeviceType(
        name=name,
        memory_bytes=2 * GIB,
        intra_GBps=1.0 * share,
        intra_latency_us=200.0 / share,
        memory_GBps=5.0 * share,
        reserve_bytes=CPU_RESERVE_BYTES,
        hop_busy_s=100e-6 / share,
        hop_busy_s_per_byte=0.25e-9 / share,
        hop_overlaps=True,
        flops=dict.fromkeys(("float32", "bfloat16", "float16"), CORE_FLOPS * share)
        | {"float64": CORE_FLOPS * share / 2},
        source="two gloo ranks over loopback, this project's development machine, 2026-11-29: 64 bytes in "
        "0.22 ms, 4 MB in 3.3 ms; CPU time of each end 0.1 ms and 0.25 ns a byte; memory as a default",
    )


def device_names() -> tuple[str, ...]:
    """Every name that ``device`` knows."""
    return (*_gpus(), CPU, f"{CPU}-<share>")


def is_cpu(name: str) -> bool:
    """Whether devices of this type are cores, which gloo connects."""
    return _cpu_share(name) is not None


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
